"""What a checkpoint costs: how long training waits for it, written at once (sync) and behind training (async), and how long it takes to load.

    python benchmarks/checkpoints.py [--strategy fsdp2|megatron] [--parameters MILLIONS] [--repetitions N] [--directory DIR]

One process.

Both are measured in turns, in one run and on one filesystem, with training steps' stand-in, a matrix product in a loop, going on after
each save. Figures are medians of wall-clock seconds; the first save of each kind, which allocates memory, is not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from random_qwen3 import ALONE
from transformers import Qwen2Config, Qwen2ForCausalLM

from hpcrl.config import AlgorithmConfig, FSDPConfig, MixedPrecisionConfig, ModelConfig, PolicyConfig, TrainerConfig
from hpcrl.config.sections.megatron import MegatronConfig
from hpcrl.rundir.checkpoints import Retention, size_of
from hpcrl.rundir.commit import verify
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.saving.checkpoint import Checkpoints
from hpcrl.types import Batch
from hpcrl.units import readable_size

_WIDTH = 512


def make_engine(world: World, strategy: Literal["fsdp2", "megatron"], millions: float, place: Path) -> PolicyEngine:
    """Return a policy of about that many parameters, with moments of its optimizer."""
    layers = max(1, round(millions * 1e6 / (12 * _WIDTH * _WIDTH)))
    config = Qwen2Config(
        vocab_size=256, hidden_size=_WIDTH, intermediate_size=8 * _WIDTH // 3, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(place)
    sharding = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))
    policy = PolicyConfig(
        model=ModelConfig(path=str(place)), fsdp_config=sharding, megatron_config=MegatronConfig(dtype="fp32")
    )
    algorithm = AlgorithmConfig(use_kl_loss=False)
    return build_policy(TrainerConfig(strategy=strategy, policy=policy, algorithm=algorithm), 1.0, world)


def work(seconds: float) -> int:
    """Return how many matrix products are made in that time, which a save in the background slows down."""
    matrix, products, until = torch.rand(512, 512), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        matrix = (matrix @ matrix).softmax(-1)
        products += 1
    return products


def measure(
    world: World, strategy: Literal["fsdp2", "megatron"], millions: float, repetitions: int, place: Path
) -> None:
    engine, loads = make_engine(world, strategy, millions, place / "model"), list[float]()
    waits: dict[str, list[float]] = {"sync": [], "async": []}
    behind, products = list[float](), dict[str, list[int]]({"sync": [], "async": []})
    kinds = {mode: _checkpoints(world, place / mode, mode) for mode in waits}
    for step in range(1, repetitions + 2):
        for mode, checkpoints in kinds.items():
            began = time.monotonic()
            checkpoints.save(engine, None, Batch(step, [], step), {})
            waited = time.monotonic() - began
            done = work(2.0)
            times = checkpoints.settle(wait=True)
            if step > 1:
                waits[mode].append(waited)
                products[mode].append(done)
                behind.extend(times.values())
    for _ in range(repetitions + 1):
        began = time.monotonic()
        engine.restore(Run(place / "sync").checkpoint(repetitions + 1))
        loads.append(time.monotonic() - began)
    size = size_of(verify(place / "sync" / "checkpoints" / f"s{repetitions + 1:06d}"))
    print(f"{millions:.0f} million parameters, {readable_size(size)} per checkpoint, {torch.get_num_threads()} threads")
    for mode, values in waits.items():
        print(f"{mode:6} training waits {median(values):.3f} s, {min(values):.3f} to {max(values):.3f}")
    print(f"load   {median(loads[1:]):.3f} s, {min(loads[1:]):.3f} to {max(loads[1:]):.3f}")
    print(
        f"async  written behind in {median(behind):.3f} s; work of the 2 s after the save: {_share(products):.0%} of sync's"
    )


def _checkpoints(world: World, place: Path, mode: str) -> Checkpoints:
    place.mkdir()
    return Checkpoints(Run(place), 1, world, keep=Retention(2), seed=0, mode="async" if mode == "async" else "sync")


def _share(products: dict[str, list[int]]) -> float:
    return median(products["async"]) / median(products["sync"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategy", choices=("fsdp2", "megatron"), default="fsdp2")
    parser.add_argument("--parameters", type=float, default=50.0, metavar="MILLIONS")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", help="on the filesystem to measure (default: the temporary one)")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=arguments.directory))
    os.environ |= ALONE
    try:
        with joined() as world:
            measure(world, arguments.strategy, arguments.parameters, arguments.repetitions, place)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
