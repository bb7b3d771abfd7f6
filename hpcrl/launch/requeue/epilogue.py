"""Decides at the end of the batch script whether the job is requeued.

    python -m hpcrl.launch.requeue.epilogue ELEMENT_LIST STATUS_OF_SRUN

hpcrl/launch/requeue/policy.py decides that. done and cancelled end the job well, all else fails it. Slurm takes a node that is down out of a
job with --no-kill. If a layout has room in the others, the batch script starts the next attempt on them at once. So it does after an attempt
that stopped in order to give its nodes other roles.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import tomli

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.requeue.elastic import cancel_pools
from hpcrl.launch.requeue.policy import RequeueDecision, requeue_decision
from hpcrl.launch.requeue.requests import cancel_others, other_jobs, recorded_requests, submitted_with
from hpcrl.launch.requeue.requeue import (
    HERE,
    LATER,
    LEAST_NODES,
    NOW,
    SOON,
    claimed_start,
    job_name,
    outlive_the_job,
    requeue_this_job,
    start_name,
)
from hpcrl.launch.requeue.room import nodes_of_job, seconds_left, seconds_until_down
from hpcrl.launch.scheduler import JobState, find_job, queue
from hpcrl.rundir.allocations import end_allocation
from hpcrl.rundir.claims import give_back
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.growth import read_growth
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import (
    Attempt,
    Kind,
    Outcome,
    cancel_outcome,
    find_attempt,
    open_attempt,
    outcome_of,
    read_outcome,
    report_outcome,
    require_attempts,
)
from hpcrl.runtime.process_status import ENDED, read_process_status
from hpcrl.runtime.signals import stop_asked

_Seen = TypeVar("_Seen")

_TROUBLE_S = 60.0
_LOOK_S = 1.0
_NOTICED_S = 30.0  # Slurm looks at its nodes now and then
_WAITS_FOR_ITS_TIME = "BeginTime"
_ENDED_BY_STOP_SIGNAL = (128 + signal.SIGTERM, 128 + signal.SIGUSR2)  # of a task that had no handlers yet


def ended_before(run: Run, job: str) -> Outcome | None:
    """Return the outcome by which a run was over when this start of its job began, or None.

    An attempt that was asked to cancel, and killed before it wrote an outcome, is cancelled here.
    """
    attempts, outcome = require_attempts(run), read_outcome(run)
    newest = attempts[-1] if attempts else None
    jobs = submitted_with(run, _job_id(job))
    if newest and newest.job_id in jobs and newest.job != job and stop_asked(run, newest.number) == "cancelled":
        cancel_outcome(run, newest.number)
        outcome = read_outcome(run)
    if outcome is None or not outcome.final:
        return None
    attempt = next((attempt for attempt in attempts if attempt.number == outcome.attempt), None)
    return outcome if attempt is None or attempt.job_id in jobs else None


def _job_id(job: str) -> str:
    return job.rpartition(".")[0]


def concluded(run: Run, job: str, status: int) -> Outcome:
    """Return how this start of a run ended; one without an outcome is a crash, unless it was asked to stop.

    Args:
        status: how srun ended.
    """
    attempt = find_attempt(run, job)
    if attempt is None:
        if before := ended_before(run, job):
            return before
        attempt, stopped = open_attempt(run, job, []), status in _ENDED_BY_STOP_SIGNAL
        message = "the agents ended before they began"
    else:
        stopped = stop_asked(run, attempt.number) is not None
        message = "the agents ended without an outcome; their logs may say why"
    kind: Kind = "interrupted" if stopped else "failed"
    if stopped:
        message = "ended before it could save"
    outcome = report_outcome(run, attempt.number, kind, message, "batch script")
    if not outcome.final and stop_asked(run, attempt.number) == "cancelled":
        cancel_outcome(run, attempt.number)  # a hang, a crash or a preemption came first
        outcome = outcome_of(run, attempt.number) or outcome
    return outcome


def settle(run: Run, job: str, status: int = 0, *, here: bool = False) -> int:
    """Requeue this job where the policy decides so; return the exit status of the batch script.

    Args:
        status: as of `concluded`.
        here: the caller is the batch script, which can start another attempt in the same allocation.
    """
    outcome, decision = _decided(run, job, status)
    others, left = patiently(lambda: other_jobs(run, _job_id(job))), 0
    if here and decision.requeue:
        stopped = outcome.kind == "interrupted"
        left = nodes_left(run, job, moves=stopped)
        if left or not stopped:  # minutes later: it may be cancelled
            outcome, decision = _decided(run, job, status)
    if decision.requeue:
        if left:
            print(f"the next attempt starts at once, on {left} node(s) of job {_job_id(job)}", flush=True)
            return HERE
        if others:
            patiently(lambda: give_back(run, claimed_start(job)))
        first = _first_for_growth(run, outcome.attempt)
        taken_over = first in others and _runs(first)
        alone = taken_over or first == _job_id(job)
        requeue_this_job(
            start=LATER if taken_over else SOON if outcome.kind == "interrupted" else None,
            exclude=decision.exclude,
            after=first if taken_over else None,
            freed={other: LATER for other in others if other != first} if alone else _freed(others),
        )
    else:
        cancel_others(run, _job_id(job))
        cancel_pools(run)
    return 0 if outcome.final else 1


def _decided(run: Run, job: str, status: int) -> tuple[Outcome, RequeueDecision]:
    """Return how a start of a run ended and whether it is requeued; its nodes count as held until now."""
    outcome, decision = patiently(lambda: (concluded(run, job, status), requeue_decision(run)))
    with suppress(OSError):  # what is printed lies on the filesystem of the run, too
        print(f"attempt {outcome.attempt}: {outcome.kind}: {decision.why}", flush=True)
    with suppress(OSError, RunError):  # an account is not worth an attempt
        end_allocation(run, job)
    return outcome, decision


def _first_for_growth(run: Run, attempt: int) -> str:
    """Return the job that goes before the others, if the attempt stopped in order to go on with more nodes; else an empty text."""
    with suppress(RunError):  # a damaged record is not worth an attempt
        growth = patiently(lambda: read_growth(run))
        return growth.job if growth and growth.attempt == attempt else ""
    return ""


def _freed(jobs: Sequence[str]) -> dict[str, str | None]:
    """Return for jobs that wait for the end of this one when they may start: at once too where they wait until the run may grow again."""
    found = dict[str, JobState]()
    if jobs:
        with suppress(SubmitError):
            found = queue(0.0)
    return {job: NOW if find_job(job, found).reason == _WAITS_FOR_ITS_TIME else None for job in jobs}


def _runs(job: str) -> bool:
    """Return whether a job runs, which has then started to take the run over."""
    with suppress(SubmitError):
        state = find_job(job, queue(0.0))
        return state.active and not state.waiting
    return False


def nodes_left(run: Run, job: str, *, moves: bool = False) -> int:
    """Return the nodes on which another attempt can start in this allocation, which has lost some; 0 where it has not, or cannot.

    Where the agent of a node has not ended by itself, Slurm is waited for until it counts that node as down. Too few nodes for a layout,
    or a time limit within two times slurm.signal_seconds, before or after that wait, leave the queue as the way on.

    Args:
        moves: the attempt was asked to stop; all nodes of the allocation are left where that was for other roles of them, else none.
    """
    attempt, least = patiently(lambda: find_attempt(run, job)), os.environ.get(LEAST_NODES)
    if attempt is None or least is None or (moves and not _moves_roles(run, attempt)):
        return 0
    if not moves and len(attempt.hosts) + len(attempt.idle) <= int(least):
        return 0
    signal_s = tomli.loads(patiently(run.config.read_text))["slurm"]["signal_seconds"]
    try:
        seconds = seconds_left(attempt.job_id) - 2 * signal_s
        left = 0
        if seconds > 0:  # Slurm shows the end of a job's grace time as its limit once it preempts it
            left = nodes_of_job(attempt.job_id) if moves else _after_losses(run, attempt, seconds)
    except (SubmitError, RunError) as error:
        print(f"which nodes are left is not known: {error}", flush=True)
        return 0
    return left if left >= int(least) else 0


def _moves_roles(run: Run, attempt: Attempt) -> bool:
    """Return whether an attempt stopped in order to go on with other roles of as many nodes."""
    with suppress(RunError):  # as of _first_for_growth
        growth = patiently(lambda: read_growth(run))
        return growth is not None and (growth.attempt, growth.nodes) == (attempt.number, len(attempt.hosts))
    return False


def _after_losses(run: Run, attempt: Attempt, most_s: float) -> int:
    """Return the nodes that the job of an attempt still has once Slurm has taken some out of it; 0 where it has all of them after `most_s`."""
    held = len(attempt.hosts) + len(attempt.idle)
    deadline = time.monotonic() + min(most_s, seconds_until_down() + _NOTICED_S)
    while (left := nodes_of_job(attempt.job_id)) >= held:
        if time.monotonic() > deadline or patiently(lambda: _all_ended(run, attempt)):
            return 0
        time.sleep(_LOOK_S)
    return left


def _all_ended(run: Run, attempt: Attempt) -> bool:
    """Return whether the agents of all nodes have ended by themselves; that of the first node has, since its srun has."""
    names = [f"agent-{index}" for index in range(1, len(attempt.hosts))]
    statuses = [read_process_status(run, name, attempt.number) for name in names]
    return all(status is not None and status.state == ENDED for status in statuses)


def patiently(look: Callable[[], _Seen]) -> _Seen:
    """Return the result of `look`, with retries: a short failure of the filesystem must not keep the run out of the queue."""
    deadline = time.monotonic() + _TROUBLE_S
    while True:
        try:
            return look()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_S)


def listed_run(element_list: Path) -> Run:
    """Return the run of this element of a job array."""
    runs = patiently(lambda: read_json(element_list))
    assert runs, element_list
    return Run(Path(runs[int(os.environ.get("SLURM_ARRAY_TASK_ID") or "0")]))


def main(element_list: Path, status: int) -> int:
    outlive_the_job()
    run, job, start = listed_run(element_list), job_name(), start_name()
    if patiently(lambda: find_attempt(run, start) is None and _given_by_hand(run, element_list.parent, job)):
        print(
            f"job {job} is none of {run.name}, whose batch script was given to sbatch by hand; `hpcrl resume` continues a run"
        )
        return 1
    return settle(run, start, status, here=True)


def _given_by_hand(run: Run, folder: Path, job: str) -> bool:
    """Return whether the run has another job, and submitit has not left what the agents of this one are started with.

    Where `hpcrl submit` was killed, this one has nothing to start from either, but it is the run's.
    """
    recorded = recorded_requests(run).values()
    return job not in (recorded or [job]) and not (folder / job / f"{job}_submitted.pkl").exists()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
