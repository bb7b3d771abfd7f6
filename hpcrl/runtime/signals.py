"""Stop requests of a process with something to save, and the end of a process with its parent."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Literal, NoReturn

from hpcrl.rundir.commit import read_json, write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""Slurm's two ways to announce the end; which of them comes, how often and in which order is up to the cluster."""

_LOOK_S = 1.0
_OTHERS_LOOK_S = 10.0  # not every rank of a large run asks the shared filesystem every second
_UNASKED_S = 30.0  # a stop file that another node wrote may show late
_ALONE_S = 15.0


def end_process(code: int = 0) -> NoReturn:
    """End this process, whose work is done, at once.

    A thread of gloo that works, or releases its last tensor, during the interpreter's shutdown aborts the process
    (https://github.com/pytorch/pytorch/issues/190489). Such threads live as long as anything refers to their group.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StopSignal:
    """Records a stop request, by signal or by the run's stop file, instead of ending the process. Created as early as possible, in the main thread.

    A process inside a collective or a rendezvous does not read `seen` meanwhile. So a thread watches:

    - Without progress to lose (imports, rendezvous, load, the first compile), the process ends by itself with 0 if it could not leave with
      the others for 15 s. Its process status then is "stopped".
    - torchrun sends SIGTERM too, when another rank has failed. Then no stop file comes within 30 s, and the process ends with 1.

    Attributes:
        seen: there is a request.
        since: time.monotonic() of its first sight; None before.
        has_progress: leaving now would lose training.
    """

    def __init__(self) -> None:
        self.seen, self.has_progress = False, False
        self.since: float | None = None
        self._run: Run | None = None
        self._signalled: float | None = None
        self._attempt, self._process, self._speaks = 0, "", False
        self._wakes, wakens = os.pipe()
        os.set_blocking(wakens, False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        # Python's own handlers wait for the main thread to come back from a collective; this does not
        signal.set_wakeup_fd(wakens, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()

    def follow(self, run: Run, attempt: int, process: str, *, speaks: bool) -> None:
        """Watch the stop file too, from now on.

        Args:
            process: name of the process_status.
            speaks: this process writes that process status; one of several that share it does.
        """
        self._attempt, self._process, self._speaks = attempt, process, speaks
        self._run = run

    def mark_stopped(self) -> None:
        """Record a stop request, wherever it came from."""
        if self.since is None:
            self.since = time.monotonic()
        self.seen = True

    def ignore(self) -> None:
        """Ignore stop requests from now on: all is done. At its very end Python gives signals back their default, which is death."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        self._signalled = self._signalled or time.monotonic()
        self.mark_stopped()

    def _watch(self) -> None:
        looked = followed = 0.0
        while True:
            ready, _, _ = select.select([self._wakes], [], [], _LOOK_S)
            if ready and set(os.read(self._wakes, 4096)) & set(STOP_SIGNALS):
                self._note()
            now = time.monotonic()
            if self._run is None or now - looked < (_LOOK_S if self._speaks or self.seen else _OTHERS_LOOK_S):
                continue
            looked, followed = (
                now,
                followed or now,
            )  # before it followed a run it could not have known whether it was asked
            if self._asked(self._run):
                self.mark_stopped()
                if not self.has_progress and now - max(self.since or now, followed) > _ALONE_S:
                    self._leave(self._run)
            elif self._signalled is not None and now - max(self._signalled, followed) > _UNASKED_S:
                os._exit(1)

    def _asked(self, run: Run) -> bool:
        try:
            return stop_asked(run, self._attempt) is not None
        except OSError as error:  # without this thread no stop request would be heard any more
            print(f"waiting for the filesystem: {error}", flush=True)
            return False

    def _leave(self, run: Run) -> None:
        if self._speaks:
            StatusWriter(run, self._process, self._attempt).write("stopped")
        os._exit(0)


Reason = Literal["interrupted", "cancelled"]
"""interrupted: the run goes on later; cancelled: it does not."""


def ask_to_stop(run: Run, attempt: int, reason: Reason, cause: str = "") -> None:
    """Ask attempt `attempt` to save and to end; a cancelled one stays cancelled.

    Args:
        cause: what is behind it, for the outcome; empty: a person, or Slurm.
    """
    if reason == "cancelled" or stop_asked(run, attempt) != "cancelled":
        write_json(run.stop, {"attempt": attempt, "reason": reason, **({"cause": cause} if cause else {})})


def stop_asked(run: Run, attempt: int) -> Reason | None:
    """Return why attempt `attempt` is to stop, or None. A file that is no request, made by hand, interrupts it."""
    try:
        request = read_json(run.stop)
    except ValueError:
        return "interrupted"
    if request is None:
        return None
    try:
        return request["reason"] if request["attempt"] == attempt else None
    except (TypeError, KeyError):
        return "interrupted"


def stop_cause(run: Run, attempt: int) -> str:
    """Return the reason of the request to stop attempt `attempt`; empty where it has none."""
    with suppress(ValueError):
        request = read_json(run.stop)
        if isinstance(request, dict) and request.get("attempt") == attempt:
            return str(request.get("cause", ""))
    return ""


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent's thread that forked it ends. Survives exec, not fork."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
