"""Lets a larger one of several requests take a run over from the attempt of a smaller one (slurm.requests, slurm.grow_minutes)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tomli

from hpcrl.errors import RunError
from hpcrl.launch.requeue.growth import grew_lately
from hpcrl.launch.requeue.requests import recorded_requests
from hpcrl.launch.requeue.requeue import claimed_start
from hpcrl.launch.requeue.restart import measure_attempt
from hpcrl.launch.requeue.room import seconds_left
from hpcrl.rundir.claims import read_claim
from hpcrl.rundir.growth import GrowthRecord, read_growth, write_growth
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, job_of, read_attempts
from hpcrl.runtime.signals import ask_to_stop


class Takeover:
    """Lets a larger request take a run over from the attempt of a smaller one.

    Args:
        job: of this batch script.
        nodes: that it has.
        layouts: nodes of the layouts of each request that takes part, the fewest first; none: no job takes the run over.
    """

    def __init__(self, run: Run, job: str, nodes: int, layouts: Mapping[str, Sequence[int]]) -> None:
        self._run, self._job = run, job
        jobs = recorded_requests(run)
        own = {jobs[name]: counts for name, counts in layouts.items() if name in jobs}
        self._most = {other: counts[-1] for other, counts in own.items()}
        # an attempt has no use for nodes beyond those of its layout
        self._nodes = max((count for count in own.get(job, ()) if count <= nodes), default=nodes)

    @cached_property
    def _slurm(self) -> dict[str, Any]:
        return tomli.loads(self._run.config.read_text())["slurm"]

    @property
    def saving_s(self) -> float:
        """Seconds within which an attempt saves."""
        return float(self._slurm["signal_seconds"]) if self._most else 0.0

    @property
    def takes_part(self) -> bool:
        """Whether this job may take the run over, or have it taken over."""
        return self._job in self._most

    def larger(self) -> list[str]:
        """Return the jobs that may take the run over from this one."""
        return [
            job for job, most in self._most.items() if job != self._job and most > self._nodes and resumes(self._run)
        ]

    def allowed_at(self) -> float | None:
        """Return the Unix time from which the run may grow again; None: it may now."""
        try:
            before = read_growth(self._run)
        except RunError as error:  # a damaged record is not worth an attempt
            print(f"when the run grew last is not known: {error}", flush=True)
            return None
        every_s = 60.0 * (self._slurm["grow_minutes"] or 0)
        return before.time + every_s if before and grew_lately(time.time(), before.time, every_s) else None

    def again_at(self) -> float | None:
        """Return the Unix time from which this job may start again although another one has the run; None: once that one has ended.

        So it may where the run grew lately, or where it has got too few of the nodes that it asks for.
        """
        if not self.takes_part:
            return None
        if (allowed := self.allowed_at()) is not None:
            return allowed
        attempt = attempt_of(self._run, read_claim(self._run).start or "")
        if attempt is None or not self._nodes <= attempt.nodes_at_start < self._most[self._job]:
            return None
        return time.time() + 60.0 * self._slurm["grow_minutes"]

    def begins(self, start: str) -> bool:
        """Ask the attempt of the start that has the run to stop for this job, where that is worth it; return whether this job waits for it.

        An attempt that has not begun is waited for. One that has trained too few steps for measures loses little.
        """
        if not {self._job, job_of(start)} <= {*self._most} or not resumes(self._run) or self.allowed_at() is not None:
            return False
        attempt = attempt_of(self._run, start)
        if attempt is None:
            return True
        if self._nodes <= attempt.nodes_at_start:
            return False
        measures = measure_attempt(self._run, attempt)
        left_s = seconds_left(self._job) - self._slurm["signal_seconds"]
        if measures is not None and measures.growth([self._nodes], left_s) is None:
            return False
        write_growth(self._run, GrowthRecord(attempt.number, time.time(), self._nodes, self._job))
        ask_to_stop(self._run, attempt.number, "interrupted", f"job {self._job} has started on {self._nodes} nodes")
        print(
            f"attempt {attempt.number} on {len(attempt.hosts)} nodes gives way to this job on {self._nodes}", flush=True
        )
        return True


def attempt_of(run: Run, start: str) -> Attempt | None:
    """Return the newest attempt of a start that claimed the run, or None."""
    own = (attempt for attempt in reversed(read_attempts(run)) if claimed_start(attempt.job) == start)
    return next(own, None)


def resumes(run: Run) -> bool:
    """Return whether the attempts of a run continue from checkpoints."""
    return tomli.loads(run.config.read_text())["trainer"]["resume_mode"] != "none"
