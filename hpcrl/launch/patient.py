"""Handing a job to a slurmctld that may be away for a moment, once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from submitit.core.utils import FailedJobError, FailedSubmissionError

from hpcrl.launch.scheduler import PATIENCE_S, cancel_slurm, is_away, queue

_RETRY_S = 5.0
_T = TypeVar("_T")


def submitted(submit: Callable[[], _T], folder: Path) -> _T:
    """Return what `submit` returns, and call it again while there is no slurmctld to hear it.

    A slurmctld that did not answer may have heard all the same. What it took is cancelled then: submitit has not given it what it
    needs to start.

    Args:
        submit: calls sbatch with a script in `folder`.

    Raises:
        FailedJobError, FailedSubmissionError: it was refused, or slurmctld is away for more than two minutes.
        SubmitError: slurmctld is away for that long after it may have taken the job.
    """
    deadline, told = time.monotonic() + PATIENCE_S, False
    while True:
        before = set(_scripts(folder))
        try:
            return submit()
        except (FailedJobError, FailedSubmissionError) as error:
            if not is_away(str(error)) or time.monotonic() > deadline:
                raise
            if not told:
                reason = str(error).strip().splitlines()[-1]
                print(f"hpcrl: {reason}; trying again for {PATIENCE_S:.0f} s", file=sys.stderr, flush=True)
                told = True
        _take_back({str(script) for script in _scripts(folder) if script not in before})
        time.sleep(_RETRY_S)


def _scripts(folder: Path) -> list[Path]:
    return sorted(folder.glob(".submission_file_*.sh"))


def _take_back(scripts: set[str]) -> None:
    taken = {
        job.partition("_")[0] for job, state in queue(PATIENCE_S).items() if state.active and state.script in scripts
    }
    for job in sorted(taken):
        cancel_slurm(job)
