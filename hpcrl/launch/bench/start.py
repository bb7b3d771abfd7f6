"""Becomes jobs/bench.py of the hpcrl that the jobs' interpreter has, which srun starts on a node.

python -m hpcrl.launch.bench.start FOLDER
"""

from __future__ import annotations

import os
import sys

from hpcrl.launch.local.foreground import job

if __name__ == "__main__":
    os.environ |= {
        name: os.environ[f"SLURM_{key}"]
        for name, key in (("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS"), ("LOCAL_RANK", "LOCALID"))
    }
    os.execv(sys.executable, [sys.executable, str(job("bench")), sys.argv[1]])
