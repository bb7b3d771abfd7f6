"""The end of the batch script: what becomes of the job after this attempt.

    python -m hpcrl.launch.finish ELEMENT_LIST STATUS_OF_SRUN

A run that goes on by itself (hpcrl/launch/budget.py) is requeued. done and cancelled end the job well, all else fails it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hpcrl.launch.budget import judge
from hpcrl.launch.elastic import cancel_pool
from hpcrl.launch.requeue import job_name, outlive_the_job, requeue_this_job
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.run.ledger import (
    Kind,
    Outcome,
    cancel_outcome,
    find_attempt,
    open_attempt,
    outcome_of,
    read_attempts,
    read_outcome,
    report_outcome,
)
from hpcrl.run.stop_request import stop_asked

_TOLD_TO_LEAVE = (128 + signal.SIGTERM, 128 + signal.SIGUSR2)  # of a task that had not come so far as to listen


def ended_before(run: Run, job: str) -> Outcome | None:
    """Return the outcome by which a run was over when this start of its job began, or None.

    An attempt that was told to be cancelled, and taken away before it could say that it was, is cancelled here.
    """
    attempts, outcome = read_attempts(run), read_outcome(run)
    newest = attempts[-1] if attempts else None
    if newest and newest.job_id == _job_id(job) and newest.job != job and stop_asked(run, newest.number) == "cancelled":
        cancel_outcome(run, newest.number)
        outcome = read_outcome(run)
    if outcome is None or not outcome.final:
        return None
    attempt = next((attempt for attempt in attempts if attempt.number == outcome.attempt), None)
    return outcome if attempt is None or attempt.job_id == _job_id(job) else None


def _job_id(job: str) -> str:
    return job.rpartition(".")[0]


def concluded(run: Run, job: str, status: int) -> Outcome:
    """Return how this start of a run ended; one that left no word is a crash, unless it was told to leave.

    Args:
        status: how srun ended.
    """
    attempt = find_attempt(run, job)
    if attempt is None:
        if before := ended_before(run, job):
            return before
        attempt, told = open_attempt(run, job, []), status in _TOLD_TO_LEAVE
        message = "the agents ended before they began"
    else:
        told = stop_asked(run, attempt.number) is not None
        message = "the agents ended without an outcome; their logs may say why"
    kind: Kind = "interrupted" if told else "failed"
    if told:
        message = "ended before it could save"
    outcome = report_outcome(run, attempt.number, kind, message, "batch script")
    if not outcome.final and stop_asked(run, attempt.number) == "cancelled":
        cancel_outcome(run, attempt.number)  # a hang, a crash or a preemption came first
        outcome = outcome_of(run, attempt.number) or outcome
    return outcome


def settle(run: Run, job: str, status: int = 0) -> int:
    """Requeue this job if its run goes on by itself; return the exit status of the batch script. `status` as of `concluded`."""
    outcome, verdict = concluded(run, job, status), judge(run)
    print(f"attempt {outcome.attempt}: {outcome.kind}: {verdict.why}", flush=True)
    if verdict.goes_on:
        requeue_this_job(start="now" if outcome.kind == "interrupted" else None, exclude=verdict.exclude)
    else:
        cancel_pool(run)
    return 0 if outcome.final else 1


def main(element_list: Path, status: int) -> int:
    outlive_the_job()
    runs = read_json(element_list)
    assert runs, element_list
    run = Run(Path(runs[int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))]))
    job, start = job_name(), f"{job_name()}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    if find_attempt(run, start) is None and not _submitted(element_list.parent, job):
        print(
            f"job {job} is none of {run.name}, whose batch script was given to sbatch by hand; `hpcrl resume` continues a run"
        )
        return 1
    return settle(run, start, status)


def _submitted(folder: Path, job: str) -> bool:
    """Return whether submitit has left what the agents of a job are started with."""
    return (folder / job / f"{job}_submitted.pkl").exists()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
