"""Starts a job of a command on this machine and waits for it, without a run or an agent."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcrl import errors
from hpcrl.errors import HpcrlError, RunError
from hpcrl.launch.agent.child import Child
from hpcrl.launch.submit.submit import code_sources
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import read_process_status
from hpcrl.text import printable

_LOOK_S = 0.2
_GRACE_S = 15.0
_CODES = {kind.exit_code: kind for kind in vars(errors).values() if isinstance(kind, type)}


def job(name: str) -> Path:
    """Return the script of a job."""
    return code_sources()["jobs"] / f"{name}.py"


def run_here(
    place: Run, process: str, command: Sequence[str], environment: Mapping[str, str], report: Callable[[str], None]
) -> None:
    """Run a job to its end; it ends with this process too.

    Args:
        place: the directory that the job works in; its output is there, as that of a process of attempt 0.
        process: name under which the job writes its process status.
        environment: variables beside those of this process.
        report: is called with the state of the process status, whenever that changes.

    Raises:
        HpcrlError: it failed, with its first error and the log that has the rest.
    """
    package = str(code_sources()["hpcrl"].parent)
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    # as in the jobs of a run: scripts beside the job, reward.py for one, are not what a user's own names mean
    own = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "HPCRL_ATTEMPT": "0"}
    variables = {**os.environ, **own, **environment}
    child, last_state = Child(process, command, variables, place.log(0, process)), ""
    try:
        while child.poll() is None:
            status = read_process_status(place, process, 0)
            if status is not None and status.state != last_state:
                last_state = status.state
                report(last_state)
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        raise RunError(f"{process} was interrupted (log: {place.log(0, process)})") from None
    finally:
        child.end(_GRACE_S)
    if status := child.poll():
        raise _CODES.get(status, HpcrlError)(child.first_error())


def to_stderr(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
