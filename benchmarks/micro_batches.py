"""What ranks wait for one another, and the tokens of the largest pass, with micro-batches by samples and by tokens.

    python benchmarks/micro_batches.py [--seeds N]

Nothing is trained: mini-batches of drawn lengths are dealt and cut by the trainer's own hpcrl/trainer/batching.py. A pass costs
what its tokens and their attention cost Qwen3-0.6B, and each waits for the rank whose pass of the same number costs most. Activations grow with the tokens of the largest
pass.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import fmean

from hpcrl.trainer.batching import MicroBatchLimit, SampleRef, idle_share, planned

_LONGEST, _VERY_LONG = 16384, 65536
_QUADRATIC = 1 / 7680  # of Qwen3-0.6B: attention / parameters without embedding and head
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "log-normal, median 1100": lambda draw: min(_LONGEST, int(draw.lognormvariate(7, 0.8))),
    "one in seven long": lambda draw: (
        draw.randint(6000, _LONGEST) if draw.random() < 1 / 7 else draw.randint(200, 1200)
    ),
    "log-normal up to 65536, median 1100": lambda draw: min(_VERY_LONG, int(draw.lognormvariate(7, 1.5))),
    "uniform, one in five cut off": lambda draw: _LONGEST if draw.random() < 1 / 5 else draw.randint(500, _LONGEST),
}
SIZES = ((8, 64), (64, 16))
"""Ranks, and samples of each in a mini-batch."""
LIMITS = {
    "1 sample": MicroBatchLimit(1),
    "4 samples": MicroBatchLimit(4),
    "16384 tokens": MicroBatchLimit(1, 16384),
    "32768 tokens": MicroBatchLimit(1, 32768),
    "32768 tokens, by attention too": MicroBatchLimit(1, 32768, quadratic=_QUADRATIC),
}


def measure(
    draw: random.Random, length: Callable[[random.Random], int], ranks: int, each: int, limit: MicroBatchLimit
) -> list[float]:
    """Return the idle share, the tokens of the largest pass, the passes, and the seconds that planning took."""
    refs = [SampleRef(0, index, max(1, length(draw))) for index in range(ranks * each)]
    began = time.perf_counter()
    plan = planned(refs, ranks, (limit, limit))
    seconds = time.perf_counter() - began
    sums = [
        sum(share[at].length for at in part)
        for share, parts in zip(plan.shares, plan.train, strict=True)
        for part in parts
    ]
    return [idle_share(plan.shares, plan.train, _QUADRATIC), max(sums), len(plan.train[0]), seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    print("| lengths | ranks x samples | micro-batch | waiting | largest pass, tokens | passes | planning, ms |")
    print("|---|---|---|---|---|---|---|")
    for name, length in LENGTHS.items():
        for ranks, each in SIZES:
            for shown, limit in LIMITS.items():
                found = [measure(random.Random(seed), length, ranks, each, limit) for seed in range(seeds)]
                idle, largest, passes, seconds = (fmean(column) for column in zip(*found, strict=True))
                figures = f"{idle:.1%} | {largest:.0f} | {passes:.1f} | {1000 * seconds:.1f}"
                print(f"| {name} | {ranks} x {each} | {shown} | {figures} |")


if __name__ == "__main__":
    main()
