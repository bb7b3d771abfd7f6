"""Records the nodes that a run held, and for how long: allocations/<job>.<restarts>.json, one file per start of a job.

The agent of the first node writes the record and renews its end every `RENEW_S`. The end of the batch script writes the last end, so an
allocation that was killed ends at most `RENEW_S` too early. Elements of elastic pools have records of their own.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hpcrl.errors import RunError
from hpcrl.rundir.commit import children, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import job_of
from hpcrl.rundir.records import as_record, damaged, is_time, read_object, with_checksum

RENEW_S = 30.0
SILENT_S = 5 * RENEW_S
"""An allocation that was not renewed for so long is over: its node is gone."""
STARTED = "HPCRL_JOB_STARTED"
"""Variable with the Unix time at which the job started: Slurm's, or that of the batch script's first lines where Slurm does not export it."""
LEFT_OVER = "left over"
_PROCESS = re.compile(r"[a-z]+-\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class AllocatedNode:
    """One node of an allocation.

    Attributes:
        role: trainer, rollout, reward or scorer; `LEFT_OVER` where the layout of the attempt has no use for the node.
        devices: of each device the processes that use it, by the names of their timelines; equal shares of the node. The first rank of a
            model stands for all of its ranks.
        lends: the second process of a device has it only while the first one waits long enough (trainer.placement.lend).
        until: Unix time at which it went back to Slurm before the others; 0: it was held as long as they.
    """

    host: str
    role: str
    devices: list[list[str]]
    lends: bool = False
    until: float = 0.0


@dataclass(frozen=True)
class Allocation:
    """Nodes that one start of a job held.

    Attributes:
        job: key of the start, as of `Attempt`.
        start, until: Unix time; it was held at least until then.
        over: `until` is its end.
        queued: Unix time since when it waited in the queue; 0: not known.
        pool: it is an element of an elastic pool.
    """

    job: str
    start: float
    until: float
    over: bool = False
    queued: float = 0.0
    pool: bool = False
    nodes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def hosts(self) -> list[AllocatedNode]:
        """The nodes, by their number."""
        return [as_record(AllocatedNode, node, f"a node of allocation {self.job}", "remove it") for node in self.nodes]


def read_allocations(run: Run) -> list[Allocation]:
    """Return the allocations of a run, oldest first.

    Raises:
        RunError: a record is damaged.
    """
    found = [_read(run.allocations / name) for name in children(run.allocations) if name.endswith(".json")]
    return sorted((one for one in found if one is not None), key=lambda one: (one.start, one.job))


def _read(path: Path) -> Allocation | None:
    remedy = "remove it: the account of the run then lacks these nodes"
    value = read_object(path, remedy)
    if value is None:
        return None
    found = as_record(Allocation, value, path, remedy)
    for node in found.nodes:
        for process in chain(*as_record(AllocatedNode, node, path, remedy).devices):
            if not _PROCESS.fullmatch(process):
                raise damaged(path, f"expected the name of a process, such as rank-0, found {process!r:.80}", remedy)
    return found


def new_allocation(run: Run, job: str, nodes: Sequence[AllocatedNode], *, pool: bool = False) -> Allocation:
    """Return the allocation of a job that has started on these nodes.

    It waited since the run was submitted, or since the end of the start before of the same job.
    """
    now, known = time.time(), os.environ.get(STARTED, "")
    start = min(now, float(known)) if known.isdecimal() else now
    return Allocation(
        job, start, now, queued=min(_queued(run, job), start), pool=pool, nodes=[asdict(node) for node in nodes]
    )


def write_allocation(run: Run, allocation: Allocation, *, over: bool = False) -> None:
    """Record that an allocation was held until now.

    Args:
        over: it ends now.
    """
    record = asdict(allocation) | {"until": time.time(), "over": over}
    write_text(run.allocation(allocation.job), with_checksum(record)[0])


def end_allocation(run: Run, job: str, *, pool: bool = False) -> None:
    """Record the end of an allocation, also of one whose agents did not begin."""
    found = _read(run.allocation(job))
    if found is None:
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or "1")
        found = new_allocation(run, job, [AllocatedNode("", "node", [])] * nodes, pool=pool)
    write_allocation(run, found, over=True)


def _queued(run: Run, job: str) -> float:
    """Return since when a start of a job has waited; 0 where that is not known. A damaged record is not worth an attempt."""
    try:
        before = [one.until for one in read_allocations(run) if job_of(one.job) == job_of(job) and one.job != job]
        record = read_object(run.submission, "") or {}
    except (RunError, OSError):
        return 0.0
    submitted = record.get("submitted")
    return max(before, default=submitted if is_time(submitted) else 0.0)
