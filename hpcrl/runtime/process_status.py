"""Process status: one small file per process of a run, with what it is doing.

`hpcrl status` and `--follow` read them, so a run can be watched from any node without reaching its servers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from hpcrl.errors import RunError
from hpcrl.faults import fault
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import as_record, read_object
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.memory import resident, resident_with_children

CONTROLLER = "controller"
RENEW_S = 5.0
FAILED = "failed"
GIVEN_UP = "given up"
"""How the state of a replica begins that failed, and once its agent will not start it again; the reason follows."""

SERVING = "serving"
"""State of a server that takes requests; its address is in the facts, as `url`."""

ENDED = "ended"
"""State of a node agent that has ended by itself."""

LEFT = ("finished", "stopped")
"""States of a process that has ended as it should."""

_REMEDY = "remove it: its process writes it again"


@dataclass(frozen=True)
class ProcessStatus:
    """Last written status of a process.

    Attributes:
        process: "controller", "trainer", "critic" where it has ranks of its own, or "rollout-<replica>".
        state: a few words for people: "starting engine", "step 12/40".
        facts: numbers behind the state (step, version, seconds per step).
        renewed: Unix time at the writer's clock.
        resident: bytes of memory of the process and of those below it; what they share counts for each.
        own: bytes of memory of the process alone.
    """

    process: str
    attempt: int
    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    renewed: float = 0.0
    resident: int = 0
    own: int = 0


class StatusWriter:
    """Writes the process status of this process; a state that has not changed is written at most every `RENEW_S` seconds.

    An OSError does not end the process: a process status is not worth an attempt.

    Args:
        heartbeat: beats at every write.
    """

    def __init__(self, run: Run, process: str, attempt: int, heartbeat: Heartbeat | None = None) -> None:
        self._heartbeat = heartbeat
        self._path, self._process, self._attempt = run.status_file(process), process, attempt
        self._written: tuple[str, dict[str, Any]] | None = None
        self._renewed = 0.0
        self._refused = False

    def write(self, state: str, **facts: Any) -> None:
        if self._heartbeat:
            self._heartbeat.beat()
        now = time.time()
        if (state, facts) == self._written and now - self._renewed < RENEW_S:
            return
        self._written, self._renewed = (state, facts), now
        try:
            host, pid = socket.gethostname(), os.getpid()
            memory = resident_with_children(pid), resident(pid)
            self._write(ProcessStatus(self._process, self._attempt, state, facts, host, pid, now, *memory))
        except OSError as error:
            if not self._refused:
                print(f"{self._path} could not be written: {error.strerror}; `hpcrl status` may not show this process")
            self._refused = True

    def _write(self, process_status: ProcessStatus) -> None:
        with suppress(RunError):  # one that is damaged is replaced
            if (written := _read(self._path)) and written.attempt > self._attempt:
                return  # this process was thought dead, and another has its place
        fault("process_status")
        write_json(self._path, asdict(process_status))


def read_process_status(run: Run, process: str, attempt: int) -> ProcessStatus | None:
    """Return the process status of one process in one attempt, or None where it has none yet. Raises RunError where the file is damaged."""
    status = _read(run.status_file(process))
    return status if status and status.attempt == attempt else None


def read_process_statuses(run: Run, attempt: int | None = None) -> list[ProcessStatus]:
    """Return the process statuses of a run, of one attempt only where `attempt` is given, ordered by process name."""
    statuses = []
    for path in sorted(run.endpoints.glob("*.json")) if run.endpoints.is_dir() else []:
        if status := _read(path):
            statuses.append(status)
    return [status for status in statuses if attempt is None or status.attempt == attempt]


def _read(path: Path) -> ProcessStatus | None:
    value = read_object(path, _REMEDY)
    return as_record(ProcessStatus, value, path, _REMEDY) if value is not None and "process" in value else None


def trainer_left(run: Run, attempt: int) -> bool:
    """Return whether the trainer has ended, and saved everything that it trained."""
    process_status = read_process_status(run, "trainer", attempt)
    return process_status is not None and process_status.state in LEFT


@contextmanager
def renewed(status: StatusWriter, state: str) -> Iterator[None]:
    """Renew a process status while this thread is busy, so that the process does not count as gone. Whether it makes progress its heartbeat tells."""
    over = Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            status.write(state)

    status.write(state)
    thread = Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def ending_told(status: StatusWriter) -> Iterator[None]:
    """Write how the work of a process ends: finished, stopped where SystemExit ends it, or failed, with the first line of the error.

    Where a signal's exit comes while a class is made, as on import, Python up to 3.11 has a RuntimeError of it, which is raised as the exit again.
    """
    try:
        yield
    except BaseException as error:
        ended = error.__cause__ if isinstance(error.__cause__, SystemExit) else error
        first_line = str(error).partition("\n")[0]
        status.write("stopped" if isinstance(ended, SystemExit) else f"{FAILED}: {first_line}")
        if ended is error:
            raise
        raise ended from None
    status.write("finished")
