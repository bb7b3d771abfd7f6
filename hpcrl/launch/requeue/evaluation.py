"""Manages the evaluation job of a run (slurm.evaluation): its end, and the end of an element's batch script.

    python -m hpcrl.launch.requeue.evaluation RUN MINUTES STATUS_OF_SRUN

An element is queued again if its agent asked for that by its exit status, or was killed, as long as versions wait or may come. It starts
at once where one waits, else after MINUTES, and so where the job's process failed. After the end of the run, a version at which it failed
slurm.crash_budget times is left out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.requeue.elastic import AGAIN, SIGNALLED, ended, is_newer, replaced
from hpcrl.launch.requeue.requeue import SOON, outlive_the_job, requeue_this_job
from hpcrl.launch.scheduler import PATIENCE_S, cancel_slurm, queue
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.evaluations import begun_evaluations, generated_at, note_failure, versions_of_element, why_left_out
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_outcome

FAILED = 76
"""Exit status of an element's agent where it is to be queued again after a failure that does not concern the run."""

_LEAVING_S, _LOOK_S = 60.0, 1.0


def evaluation_job(run: Run) -> str | None:
    """Return the id of the job array that evaluates a run's versions; None: there is none."""
    return (read_json(run.submission) or {}).get("evaluation")


def cancel_evaluation(run: Run) -> None:
    """Cancel the evaluation job of a run, if it has one."""
    cancel_recorded_evaluation(read_json(run.submission) or {})


def cancel_recorded_evaluation(record: Mapping[str, Any]) -> None:
    """Cancel the evaluation job that a submission's record names, if it names one."""
    if job := record.get("evaluation"):
        with suppress(SubmitError):  # it is over, and Slurm has forgotten it
            cancel_slurm(job)


def end_evaluation(run: Run) -> None:
    """Cancel the evaluation job of a run, if it has one, and wait until none of its processes writes.

    Raises:
        RunError: it did not end in time.
        SubmitError: Slurm could not be asked.
    """
    cancel_evaluation(run)
    job, deadline = evaluation_job(run), time.monotonic() + _LEAVING_S
    while job and any(name.partition("_")[0] == job and state.active for name, state in queue(PATIENCE_S).items()):
        if time.monotonic() > deadline:
            raise RunError(f"the evaluation job {job} of {run.name} has not ended yet; try again in a minute")
        time.sleep(_LOOK_S)


def waiting_versions(run: Run, element: int) -> list[int]:
    """Return the versions of an element that wait for its engine."""
    return [version for version in unscored_versions(run, element) if generated_at(run, version) is None]


def unscored_versions(run: Run, element: int) -> list[int]:
    """Return the versions of an element of the job that have no scores yet, by the settings of the run."""
    tree = tomli.loads(run.config.read_text())
    elements, interval = tree["slurm"]["evaluation"]["engines"], tree["trainer"]["eval_interval"]
    return versions_of_element(run, element, elements, interval)


def nothing_to_do(run: Run, array: str, element: int) -> str | None:
    """Return why an element of the job `array` has nothing more to do, or None: a version waits for it, or may come.

    What waits of a run that was cancelled is not evaluated.
    """
    if is_newer(run, array):
        return None
    why = replaced(run, array)
    if why or (why := ended(run)) is None or not unscored_versions(run, element):
        return why
    outcome = read_outcome(run)
    return why if outcome is not None and outcome.kind == "cancelled" else None


def describe_waiting(run: Run) -> str:
    """Return which versions wait for the evaluation job of a run, for people; empty where none do."""
    job, waiting = evaluation_job(run), begun_evaluations(run)
    reasons = {version: why_left_out(run, version) for version in waiting}
    marked = (f"v{version} ({why}, left out)" if why else f"v{version}" for version, why in reasons.items())
    return f"{', '.join(marked)}: for job {job}" if job and waiting else ""


def next_start(run: Run, element: int, minutes: int) -> str:
    """Return when an element is to start again: at once where a version waits for it, else after so many minutes."""
    return SOON if waiting_versions(run, element) else f"now+{minutes}minutes"


def _count_failure(run: Run, array: str, element: int) -> None:
    """Count a failure of an element, for the version that it takes first."""
    if waiting := waiting_versions(run, element):
        note_failure(run, waiting[0], array, tomli.loads(run.config.read_text())["slurm"]["crash_budget"])


def main(run: Run, minutes: int, status: int) -> int:
    outlive_the_job()
    array, element, killed = (
        os.environ["SLURM_ARRAY_JOB_ID"],
        int(os.environ["SLURM_ARRAY_TASK_ID"]),
        status >= SIGNALLED,
    )
    if status not in (AGAIN, FAILED) and not killed:
        return status
    if why := nothing_to_do(run, array, element):
        print(f"not queued again: {why}", flush=True)
        return 0
    if status == FAILED and ended(run):
        _count_failure(run, array, element)
    later = f"now+{minutes}minutes"
    start = None if killed else later if status == FAILED else next_start(run, element, minutes)
    requeue_this_job(start=start, exclude=())
    return 0


if __name__ == "__main__":
    sys.exit(main(Run(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
