"""The elastic pool of a run, from its files: its job array, the attempt that it is to serve, and whether it is still wanted."""

from __future__ import annotations

from contextlib import suppress

from hpcrl.errors import SubmitError
from hpcrl.launch.budget import judge
from hpcrl.launch.scheduler import cancel_slurm
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.run.ledger import Attempt, outcome_of, read_attempts, read_outcome

AGAIN = 75
"""Exit status of an element's agent where it is to be queued again: Slurm took its node away, or the run itself waits in the queue."""


def cancel_pool(run: Run) -> None:
    """Take the pool of a run off the cluster, if it has one; an element that is overlooked finds nothing to do and ends."""
    record = read_json(run.submission)
    if record and (pool := record.get("pool")):
        with suppress(SubmitError):  # its job array is over, and Slurm has forgotten it
            cancel_slurm(pool)


def current_attempt(run: Run) -> Attempt | None:
    """Return the newest attempt of the run's present job, or None while that has not started."""
    record, attempts = read_json(run.submission), read_attempts(run)
    return attempts[-1] if record and attempts and attempts[-1].job_id == record["job_id"] else None


def unwanted(run: Run, pool: str) -> str | None:
    """Return why the elements of the job array `pool` have nothing more to do for a run, or None."""
    if not run.config.is_file():
        return "the run is gone"
    record = read_json(run.submission)
    if record is None:  # it is about to be written
        return None
    if record.get("pool", pool) != pool:  # one that was found in the queue afterwards does not name it
        return "the run has another pool, or none any more"
    attempt, outcome = current_attempt(run), read_outcome(run)
    if attempt is not None and outcome_of(run, attempt.number) is not None:
        verdict = judge(run)
        return None if verdict.goes_on else verdict.why
    if attempt is None and outcome is not None and outcome.ended > record["submitted"] and outcome.final:
        return f"{outcome.kind}: {outcome.message}"  # in the queue
    return None
