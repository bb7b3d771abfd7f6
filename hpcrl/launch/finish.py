"""The end of the batch script: decide from the outcome file what becomes of the job.

    python -m hpcrl.launch.finish ELEMENT_LIST

done and cancelled end the job well; interrupted requeues it, unless it could only start again at step 0 (trainer.resume_mode=none);
failed, or no outcome at all, fails it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.run.ledger import read_attempts, read_outcome

_KILLED_WITHIN_S = 60


def job_name() -> str:
    """Return the id by which Slurm requeues this element alone: the raw job id may be that of the whole array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def main(element_list: Path) -> int:
    runs = read_json(element_list)
    assert runs, element_list
    index = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    run = Run(Path(runs[index]))
    attempts, outcome = read_attempts(run), read_outcome(run)
    if not attempts or outcome is None or outcome.attempt != attempts[-1].number:
        print(f"{run.path}: the attempt left no outcome", file=sys.stderr)
        return 1
    print(f"attempt {outcome.attempt}: {outcome.kind}: {outcome.message}", flush=True)
    # not by Config, which would import the modules of a user's config_class once more
    if outcome.kind == "interrupted" and tomllib.loads(run.config.read_text())["trainer"]["resume_mode"] == "none":
        print("not requeued: trainer.resume_mode is none", flush=True)
    elif outcome.kind == "interrupted":
        subprocess.run(["scontrol", "requeue", job_name()], check=False)
        time.sleep(_KILLED_WITHIN_S)
    return 0 if outcome.kind in ("done", "cancelled") else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
