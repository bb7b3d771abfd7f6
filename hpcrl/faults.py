"""Fault points: places where a test makes this process die, stop or fail, to see that nothing is lost there.

    HPCRL_FAULT="commit.renamed:kill save.shards@3:raise=ENOSPC update:sleep=60"

Each entry is POINT[@N]:ACTION, at the Nth time (the first by default) that the process passes the point:

    kill            the process kills itself
    stop            it stops, as if it hung
    raise=ERRNO     OSError of that name
    sleep=SECONDS   it waits
    signal=NAME     it gets that signal, such as SIGTERM, and goes on
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter

_VARIABLE = "HPCRL_FAULT"
_passed: Counter[str] = Counter()


def fault(point: str) -> None:
    """Fail here if the environment names this point; do nothing otherwise."""
    wanted = os.environ.get(_VARIABLE)
    if not wanted:
        return
    _passed[point] += 1
    for entry in wanted.split():
        where, _, action = entry.partition(":")
        name, _, number = where.partition("@")
        if name == point and int(number or 1) == _passed[point]:
            _fail(point, action)


def _fail(point: str, action: str) -> None:
    kind, _, value = action.partition("=")
    print(f"fault point {point}: {action}", flush=True)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep":
        time.sleep(float(value))
    elif kind == "signal":
        os.kill(os.getpid(), signal.Signals[value])
    elif kind == "raise":
        number = getattr(errno, value)
        raise OSError(number, os.strerror(number), point)
    else:
        raise ValueError(f"{_VARIABLE}: {action!r} is none of kill, stop, raise=ERRNO, sleep=SECONDS, signal=NAME")
