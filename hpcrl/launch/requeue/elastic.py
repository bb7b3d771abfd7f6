"""Manages the elastic pools of a run: their job arrays, the attempt that they serve, and the end of an element's batch script.

    python -m hpcrl.launch.requeue.elastic RUN STATUS_OF_SRUN

An element is queued again if its agent asked for that by its exit status, or was killed, and the run goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.requeue.policy import requeue_decision
from hpcrl.launch.requeue.requests import requests_of
from hpcrl.launch.requeue.requeue import SOON, outlive_the_job, requeue_this_job, start_name
from hpcrl.launch.scheduler import cancel_slurm
from hpcrl.rundir.allocations import end_allocation
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, outcome_of, read_attempts, read_outcome

AGAIN = 75
"""Exit status of an element's agent where it is to be queued again: Slurm took its node away, or the run itself waits in the queue."""
_LATER = "now+5minutes"
SIGNALLED = 128
"""From this exit status of srun on, as of a shell, a signal ended it."""


def cancel_pools(run: Run) -> None:
    """Cancel the elastic pools of a run, if it has any; an overlooked element finds nothing to do and ends."""
    cancel_recorded_pools(read_json(run.submission) or {})


def cancel_recorded_pools(record: Mapping[str, Any]) -> None:
    """Cancel the elastic pools that a submission's record names."""
    for pool in _arrays(record):
        with suppress(SubmitError):  # the job array is over, and Slurm has forgotten it
            cancel_slurm(pool)


def _arrays(record: Mapping[str, Any]) -> list[str]:
    """Return the ids of the job arrays that a submission's record names: of the replicas' pool, and of the scorers'."""
    return [*filter(None, [record.get("pool")]), *record.get("scorer_pools", {}).values()]


def current_attempt(run: Run) -> Attempt | None:
    """Return the newest attempt of the run's present submission, or None while none of its jobs has started."""
    record, attempts = read_json(run.submission), read_attempts(run)
    return attempts[-1] if record and attempts and attempts[-1].job_id in requests_of(record).values() else None


def unwanted(run: Run, pool: str) -> str | None:
    """Return why the elements of the job array `pool` have nothing more to do for a run, or None."""
    return None if is_newer(run, pool) else replaced(run, pool) or ended(run)


def is_newer(run: Run, array: str) -> bool:
    """Return whether a job array is newer than all jobs in a run's record: `hpcrl resume` has submitted it, and is about to record it."""
    record = read_json(run.submission) if run.config.is_file() else None
    if not record or "pool" not in record:
        return False
    recorded = [*requests_of(record).values(), *_arrays(record), *filter(None, [record.get("evaluation")])]
    return all(int(array) > int(job.partition("_")[0]) for job in recorded)


def replaced(run: Run, array: str) -> str | None:
    """Return why a job array no longer belongs to a run, or None."""
    if not run.config.is_file():
        return "the run is gone"
    # a record of a job that was found in the queue afterwards names none; one that is about to be written is not there
    record = read_json(run.submission) or {}
    if "pool" in record and array not in (*_arrays(record), record.get("evaluation")):
        return "the run has another pool, or none any more"
    return None


def ended(run: Run) -> str | None:
    """Return why a run does not go on, or None."""
    record = read_json(run.submission)
    if record is None:  # it is about to be written
        return None
    attempt, outcome = current_attempt(run), read_outcome(run)
    if attempt is not None and outcome_of(run, attempt.number) is not None:
        decision = requeue_decision(run)
        return None if decision.requeue else decision.why
    if attempt is None and outcome is not None and outcome.ended > record["submitted"] and outcome.final:
        return f"{outcome.kind}: {outcome.message}"  # in the queue
    return None


def main(run: Run, status: int) -> int:
    outlive_the_job()
    if run.config.is_file():
        with suppress(OSError, RunError):  # an account is not worth an element
            end_allocation(run, start_name(), pool=True)
    killed = status >= SIGNALLED
    if status != AGAIN and not killed:
        return status
    if why := unwanted(run, os.environ["SLURM_ARRAY_JOB_ID"]):
        print(f"not queued again: {why}", flush=True)
        return 0
    attempt = current_attempt(run)
    runs = attempt is not None and outcome_of(run, attempt.number) is None
    requeue_this_job(start=None if killed else SOON if runs else _LATER, exclude=())
    return 0


if __name__ == "__main__":
    sys.exit(main(Run(Path(sys.argv[1])), int(sys.argv[2])))
