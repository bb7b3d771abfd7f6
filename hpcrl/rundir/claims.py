"""Claims of a run: which start of a job may open its attempts, where several jobs wait for the run (slurm.requests).

    claims/000001.json   {"start": "41_0.0"}   this start of job 41_0 has the run
    claims/000002.json   {"start": null}       it has given the run back
    claims/000003.json   {"start": "42_0.0"}

The newest claim counts. Each number is taken once, by a hard link: of two jobs that claim a run at the same time one has it.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

from hpcrl.rundir.commit import children, place, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import damaged, read_object, with_checksum

_CLAIM = re.compile(r"(\d{6,})\.json", re.ASCII)


@dataclass(frozen=True)
class RunClaim:
    """The newest claim of a run.

    Attributes:
        number: 0 where there is none.
        start: key of the start that has the run, as `Attempt.job`; None: the run is free.
    """

    number: int
    start: str | None


def read_claim(run: Run) -> RunClaim:
    """Return the newest claim. Raises RunError where it is damaged."""
    number = max((int(match[1]) for name in children(run.claims) if (match := _CLAIM.fullmatch(name))), default=0)
    if number == 0:
        return RunClaim(0, None)
    path, remedy = run.claims / f"{number:06d}.json", "remove it: the claim before it then counts"
    start = (read_object(path, remedy) or {}).get("start", 0)
    if not isinstance(start, str | None):
        raise damaged(path, f"found the start {start!r:.80}", remedy)
    return RunClaim(number, start)


def claim(run: Run, start: str | None, after: RunClaim) -> bool:
    """Claim a run for a start, or with None give it back, unless there is a later claim than `after`; return whether that was done."""
    target = run.claims / f"{after.number + 1:06d}.json"
    beside = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
    write_text(beside, with_checksum({"start": start})[0])
    place(beside, target)
    return read_claim(run) == RunClaim(after.number + 1, start)


def give_back(run: Run, start: str) -> None:
    """Let other jobs claim the run, if `start` has it."""
    if (newest := read_claim(run)).start == start:
        claim(run, None, newest)
