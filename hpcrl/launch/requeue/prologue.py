"""Decides before each attempt of a batch script whether its job is the run, where several requests wait for it (slurm.requests).

    python -m hpcrl.launch.requeue.prologue ELEMENT_LIST [REQUEST=NODES,… ...]

It claims the run and makes the other jobs wait for this one by a dependency. Slurm drops that when this job ends, and
hpcrl/launch/requeue/epilogue.py when it is requeued. A job that starts while another one has the run goes back into the queue.

With slurm.grow_minutes the batch script names the requests whose attempts give way to larger ones, with the nodes of their layouts. Jobs of
more nodes than this attempt has stay in the queue, and one that starts takes the run over. It asks the attempt to stop, and waits until that
has saved.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.requeue.elastic import current_attempt
from hpcrl.launch.requeue.epilogue import ended_before, listed_run, patiently
from hpcrl.launch.requeue.policy import requeue_decision
from hpcrl.launch.requeue.requests import other_jobs, recorded_requests
from hpcrl.launch.requeue.requeue import (
    claimed_start,
    job_name,
    outlive_the_job,
    requeue_this_job,
    set_dependency,
    start_name,
)
from hpcrl.launch.requeue.takeover import Takeover, attempt_of, resumes
from hpcrl.launch.scheduler import GONE, PATIENCE_S, JobState, find_job, queue
from hpcrl.rundir.claims import claim, read_claim
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import job_of, outcome_of
from hpcrl.runtime.signals import stop_asked

NOTHING_TO_DO = 3
"""Exit status where the run is over."""
_RECORDED_S = 30.0
_LEAVING_S = 120.0
_LOOK_S = 1.0


def take(run: Run, start: str, takeover: Takeover | None = None) -> str | None:
    """Claim the run for this start of a job; return the job that has the run instead, or None.

    The claim of a job that has no processes any more counts no longer. An attempt that saves and stops is waited for.

    Args:
        takeover: asks an attempt on fewer nodes to stop; None: none is asked.
    """
    own, deadline = job_of(start), time.monotonic() + _LEAVING_S + (takeover.saving_s if takeover else 0.0)
    while True:
        newest = read_claim(run)
        owner = job_of(newest.start or "")
        other = newest.start is not None and owner != own
        decision = decide_claim(_state(owner) if other else GONE, other and _leaves(run, newest.start))
        if decision == "yield" and newest.start and takeover and _begins(takeover, newest.start):
            decision = "wait"
        if decision == "claim":
            if newest.start == start or claim(run, start, newest):
                return None
        elif decision == "yield" or time.monotonic() > deadline:
            return owner
        else:
            time.sleep(_LOOK_S)


def _begins(takeover: Takeover, start: str) -> bool:
    try:
        return takeover.begins(start)
    except (SubmitError, RunError) as error:
        print(f"whether this job should take the run over is not known: {error}", flush=True)
        return False


def decide_claim(owner: JobState, leaves: bool) -> Literal["claim", "yield", "wait"]:
    """Decide what a job that has started does about its run: claim it, go back into the queue, or wait for the attempt that has it.

    Args:
        owner: state of the job that has the run; GONE where none has it.
        leaves: that job's attempt was asked to stop, or has ended.
    """
    if owner.known and (owner.waiting or not owner.active):
        return "claim"
    return "wait" if leaves or owner.name == "COMPLETING" else "yield"


def _state(job: str) -> JobState:
    try:
        return find_job(job, queue(PATIENCE_S))
    except SubmitError as error:
        print(f"whether job {job} runs is not known: {error}", flush=True)
        return JobState("UNKNOWN")


def _leaves(run: Run, start: str | None) -> bool:
    """Return whether the attempt of a start was asked to stop, or has ended."""
    attempt = attempt_of(run, start) if start else None
    return attempt is not None and (
        stop_asked(run, attempt.number) is not None or outcome_of(run, attempt.number) is not None
    )


def over(run: Run, start: str) -> str | None:
    """Return why a run that this start has claimed needs no further attempt, or None."""
    if before := ended_before(run, start):
        return f"{before.kind}: {before.message}"
    if job_of(start) not in recorded_requests(run).values():
        return None  # of a submission that is about to be recorded, for which the attempts so far decide nothing
    attempt = current_attempt(run)
    if attempt is None:
        return None
    if outcome_of(run, attempt.number) is None:
        return None if resumes(run) else "its attempt is lost, and trainer.resume_mode is none"
    decision = requeue_decision(run)
    return None if decision.requeue else decision.why


def _await_record(run: Run, job: str) -> None:
    """Wait until `hpcrl submit` has recorded the jobs of this submission, which it does once it has submitted all of them."""
    deadline = time.monotonic() + _RECORDED_S
    while job not in recorded_requests(run).values() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def main(element_list: Path, layouts: Sequence[str]) -> int:
    run, job, start = listed_run(element_list), job_name(), start_name()
    patiently(lambda: _await_record(run, job))
    sizes = {name: [*map(int, counts.split(","))] for name, _, counts in (one.rpartition("=") for one in layouts)}
    takeover = patiently(lambda: Takeover(run, job, int(os.environ.get("SLURM_JOB_NUM_NODES") or "1"), sizes))
    owner = patiently(lambda: take(run, claimed_start(start), takeover))
    if owner is not None:
        print(f"job {owner} has {run.name}; this one goes back into the queue", flush=True)
        if not patiently(lambda: resumes(run)):  # there is no second attempt to wait for
            return NOTHING_TO_DO
        outlive_the_job()
        again = patiently(takeover.again_at)
        start_at = _slurm_time(again) if again else None
        requeue_this_job(start=start_at, exclude=(), after=None if again else owner)
        return 1
    if why := patiently(lambda: over(run, start)):
        print(f"nothing to do: {why}", flush=True)
        return NOTHING_TO_DO
    larger = patiently(takeover.larger)
    set_dependency(patiently(lambda: [other for other in other_jobs(run, job) if other not in larger]), after=job)
    if larger:
        allowed = patiently(takeover.allowed_at)
        set_dependency(larger, after=None, start=_slurm_time(allowed) if allowed else None)
    return 0


def _slurm_time(unix: float) -> str:
    return datetime.fromtimestamp(unix).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
