"""The end of the batch script of one element of an elastic pool: queue it again if its agent says so and the run goes on.

python -m hpcrl.launch.pool_finish RUN STATUS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpcrl.launch.elastic import AGAIN, current_attempt, unwanted
from hpcrl.launch.requeue import outlive_the_job, requeue_this_job
from hpcrl.run.layout import Run
from hpcrl.run.ledger import outcome_of

_LATER = "now+5minutes"


def main(run: Run, status: int) -> int:
    outlive_the_job()
    if status != AGAIN:
        return status
    if why := unwanted(run, os.environ["SLURM_ARRAY_JOB_ID"]):
        print(f"not queued again: {why}", flush=True)
        return 0
    attempt = current_attempt(run)
    runs = attempt is not None and outcome_of(run, attempt.number) is None
    requeue_this_job(start="now" if runs else _LATER, exclude=())
    return 0


if __name__ == "__main__":
    sys.exit(main(Run(Path(sys.argv[1])), int(sys.argv[2])))
