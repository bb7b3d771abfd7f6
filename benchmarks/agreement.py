"""What it costs that ranks agree before each micro-batch whether to stop: one all-reduce of one number over gloo, and the heartbeat.

    python benchmarks/agreement.py [--ranks N] [--times N]

The ranks are processes of this machine. Between nodes a round trip of the network comes on top for each of the log2(ranks) rounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import DIRECTORY, Heartbeat
from hpcrl.runtime.signals import StopSignal
from hpcrl.trainer.distributed import joined
from hpcrl.trainer.stop import StopConsensus


def rank(times: int) -> None:
    with tempfile.TemporaryDirectory() as folder, joined() as world:
        os.environ[DIRECTORY] = folder
        consensus = StopConsensus(world, StopSignal(), Heartbeat(Run(Path(folder)), 1, f"rank-{world.rank}"))
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            consensus("update.micro_batch")
            seconds.append(time.perf_counter() - began)
        if world.first:
            found = sorted(seconds[times // 10 :])
            worst = found[int(0.99 * len(found))]
            print(f"| {world.size} | {1e6 * median(found):.0f} | {1e6 * worst:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--times", type=int, default=2000)
    options = parser.parse_args()
    print("| ranks | median, us | 99th of 100, us |\n|---|---|---|", flush=True)
    for ranks in options.ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        subprocess.run(
            [*command, "--times", str(options.times)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(int(sys.argv[2]))
    else:
        main()
