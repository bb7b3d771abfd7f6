"""Prints the logs of an attempt: one file per process, with the process's name before each line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcrl.errors import RunError
from hpcrl.rundir.commit import open_file
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.text import log_lines

_POLL_S = 0.5


def _files(run: Run, attempt: int, role: str | None) -> list[Path]:
    return sorted(
        path for path in run.logs(attempt).glob("*.log") if role is None or path.stem.partition("-")[0] == role
    )


def _new_lines(path: Path, offsets: dict[Path, int]) -> Iterator[str]:
    with open_file(path) as file:
        file.seek(offsets.get(path, 0))
        for line in file:
            if not line.endswith(b"\n"):
                break
            offsets[path] = offsets.get(path, 0) + len(line)
            yield line.decode(errors="replace").rstrip("\r\n")


def show(run: Run, role: str | None, attempt: int | None) -> dict[Path, int]:
    """Print the logs of an attempt (the newest by default); return how far each file was read.

    Raises:
        RunError: there is no such attempt, or it has no logs of that role.
    """
    attempts = [known.number for known in read_attempts(run)]
    if not attempts:
        raise RunError(f"{run.name} has not started yet; `hpcrl status {run.name}` says why")
    chosen = attempt or attempts[-1]
    files = _files(run, chosen, role)
    if not files:
        raise RunError(
            f"no logs{f' of role {role}' if role else ''} in attempt {chosen} of {run.name}; attempts: {attempts}"
        )
    offsets: dict[Path, int] = {}
    _print_new(files, offsets)
    return offsets


def follow(run: Run, role: str | None, over: Callable[[], bool]) -> None:
    """Print the logs as they grow, through requeues, until the run is over; `over` is asked twice a second."""
    offsets: dict[Path, int] = {}
    while True:
        ended = over()
        for attempt in read_attempts(run):
            _print_new(_files(run, attempt.number, role), offsets)
        if ended:
            return
        time.sleep(_POLL_S)


def _print_new(files: list[Path], offsets: dict[Path, int]) -> None:
    for path in files:
        for line in _new_lines(path, offsets):
            for part in log_lines(line):
                print(f"{path.parent.name}/{path.stem} | {part}")
    sys.stdout.flush()
