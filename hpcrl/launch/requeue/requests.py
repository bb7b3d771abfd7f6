"""Names the jobs of a run's submission: one, or with several requests (slurm.requests) one for each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpcrl.errors import SubmitError
from hpcrl.launch.scheduler import cancel_slurm
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run


def requests_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the job of each request that a submission's record names, in their order; the only one has no name."""
    return record.get("requests") or ({"": record["job_id"]} if "job_id" in record else {})


def recorded_requests(run: Run) -> dict[str, str]:
    """Return the job of each request of a run's newest submission; none where it is not recorded, or the record is damaged."""
    with suppress(ValueError):
        record = read_json(run.submission)
        return requests_of(record) if isinstance(record, dict) else {}
    return {}


def submitted_with(run: Run, job: str) -> list[str]:
    """Return the jobs of the submission that this job belongs to, itself included; itself alone where the record of the run does not name it."""
    jobs = list(recorded_requests(run).values())
    return jobs if job in jobs else [job]


def other_jobs(run: Run, job: str) -> list[str]:
    """Return the jobs that wait for the same run as this one."""
    return [other for other in submitted_with(run, job) if other != job]


def cancel_others(run: Run, job: str) -> None:
    """Cancel the jobs that wait for the same run as this one; an overlooked one finds nothing to do and ends."""
    for other in other_jobs(run, job):
        with suppress(SubmitError):  # it is over, and Slurm has forgotten it
            cancel_slurm(other)
