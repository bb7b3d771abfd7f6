"""The end of the batch script: what becomes of the job after this attempt.

    python -m hpcrl.launch.finish ELEMENT_LIST

A run that goes on by itself (hpcrl/launch/budget.py) is requeued. done and cancelled end the job well, all else fails it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hpcrl.launch.budget import judge
from hpcrl.launch.elastic import cancel_pool
from hpcrl.launch.requeue import job_name, requeue_this_job
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.run.ledger import Outcome, find_attempt, open_attempt, read_attempts, read_outcome, report_outcome


def concluded(run: Run, job: str) -> Outcome:
    """Return how this start of a run ended; one that left no word is a crash."""
    attempt, before = find_attempt(run, job), read_outcome(run)
    if attempt is None and before and before.final and is_of(run, before, job):
        return before
    if attempt is None:
        attempt = open_attempt(run, job, [])
        return report_outcome(run, attempt.number, "failed", "the agents ended before they began", "batch script")
    return report_outcome(
        run, attempt.number, "failed", "the agents ended without an outcome; their logs may say why", "batch script"
    )


def is_of(run: Run, outcome: Outcome, job: str) -> bool:
    """Return whether an outcome is one of the job that `job` is a start of, or of a run that had none before."""
    attempts = {attempt.number: attempt for attempt in read_attempts(run)}
    attempt = attempts.get(outcome.attempt)
    return attempt is None or attempt.job_id == job.rpartition(".")[0]


def settle(run: Run, job: str) -> int:
    """Requeue this job if its run goes on by itself; return the exit status of the batch script."""
    outcome, verdict = concluded(run, job), judge(run)
    print(f"attempt {outcome.attempt}: {outcome.kind}: {verdict.why}", flush=True)
    if verdict.goes_on:
        requeue_this_job(start="now" if outcome.kind == "interrupted" else None, exclude=verdict.exclude)
    else:
        cancel_pool(run)
    return 0 if outcome.final else 1


def main(element_list: Path) -> int:
    # Slurm ends this process with the job that it asks Slurm to requeue; it needs a moment longer than that
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    runs = read_json(element_list)
    assert runs, element_list
    run = Run(Path(runs[int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))]))
    return settle(run, f"{job_name()}.{os.environ.get('SLURM_RESTART_COUNT', '0')}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
