"""Mixtures of experts on a CPU: what multiplying all experts at once saves, what router replay leaves of the mismatch, and what ranks that
share experts need.

python benchmarks/experts.py                     # the first two
python benchmarks/experts.py --only kernels      # ways of multiplying experts: processor seconds of one thread, in turns
python benchmarks/experts.py --only replay       # an engine in bfloat16 against trainers in float32 and bfloat16
python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/experts.py --only ranks
                                                 # fsdp_config.expert_parallel_size: memory and processor seconds of each rank

The memory of ranks is what a forward and backward pass adds at most to what a process has (VmHWM after it, VmRSS before).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from benchmarks.shared_prefixes import make_group
from hpcrl.config import AlgorithmConfig, FSDPConfig, MixedPrecisionConfig, ModelConfig, PolicyConfig, TrainerConfig
from hpcrl.config.sections.generator import InferenceEngineConfig
from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.data.model_config import ConfiguredModel
from hpcrl.rollout.engines.embedded.launch import Embedded, EmbeddedOptions
from hpcrl.rollout.transcript import Transcript
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.packing import PackedSamples, pack
from hpcrl.types import MicroBatch

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart" / "model"
WAYS = "eager", "grouped_mm", "batched_mm"
LARGEST = 2e9  # bytes of the copies of weights that batched_mm makes


def mixture(experts: int, chosen: int, hidden: int, columns: int, layers: int = 2) -> Qwen3MoeConfig:
    sizes: dict[str, Any] = {
        "vocab_size": len(AutoTokenizer.from_pretrained(QUICKSTART)), "hidden_size": hidden, "intermediate_size": columns,
        "moe_intermediate_size": columns, "num_experts": experts, "num_experts_per_tok": chosen, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "norm_topk_prob": True, "initializer_range": 0.1,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    return Qwen3MoeConfig(**sizes)


def kernels(rounds: int) -> None:
    torch.set_num_threads(1)
    print("| experts x columns, per token, tokens | type | forward and backward, ms | forward, ms |\n|---|---|---|---|")
    for experts, chosen, hidden, columns, tokens in (
        (8, 2, 64, 48, 64),
        (32, 4, 128, 64, 512),
        (64, 8, 256, 128, 1024),
    ):
        fits = tokens * chosen * 2 * columns * hidden * 4 < LARGEST
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(mixture(experts, chosen, hidden, columns), dtype=dtype)
            ids = torch.randint(0, model.config.vocab_size, (1, tokens))
            seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS if fits or way != "batched_mm"}
            for _ in range(rounds + 1):
                for way, found in seconds.items():
                    model.set_experts_implementation(way)
                    found.append((_timed(model, ids, gradients=True), _timed(model, ids, gradients=False)))
            told = " | ".join(_medians(seconds, column) for column in range(2))
            print(f"| {experts} x {columns}, {chosen}, {tokens} | {dtype} | {told} |", flush=True)


def _medians(seconds: dict[str, list[tuple[float, float]]], column: int) -> str:
    """Return those of all rounds but the first."""
    return " / ".join(f"{way} {1e3 * median(each[column] for each in found[1:]):.0f}" for way, found in seconds.items())


def _timed(model: Any, ids: torch.Tensor, *, gradients: bool) -> float:
    began = time.process_time()
    with torch.set_grad_enabled(gradients):
        logits = model(ids).logits
        if gradients:
            logits.float().sum().backward()
    return time.process_time() - began


def replay(samples: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(mixture(64, 8, 64, 32, layers=6)).save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (path / name).write_bytes((QUICKSTART / name).read_bytes())
        print("| engine | trainer | mean difference, nats | with replay |\n|---|---|---|---|")
        for engine, trainer in (("bfloat16", "fp32"), ("bfloat16", "bf16"), ("float32", "fp32")):
            packed = generated(path, engine, samples)
            plain, replayed = (difference(packed, path, trainer, how) for how in ("none", "R3"))
            print(f"| {engine} | {trainer} | {plain:.2e} | {replayed:.2e} |", flush=True)


def generated(path: Path, dtype: Any, samples: int) -> PackedSamples:
    """Return samples with the experts that their tokens went to."""
    section, prompt = InferenceEngineConfig(model_dtype=dtype), [4, 9, 2, 7]
    options = EmbeddedOptions(ConfiguredModel(path=str(path), role="trainer.policy"), section, 256, True, True)
    engine = Embedded(options)
    engine.wait_ready(600)
    sampling = {"temperature": 1.0, "max_tokens": 100, "ignore_eos": True}
    rows = []
    for said in asyncio.run(engine.connect().generate(prompt, samples, 1, sampling)):
        row = Transcript(prompt)
        row.add_response(said)
        rows.append(row.sample("stop", {}))
    engine.stop()
    return pack(rows)


def difference(samples: PackedSamples, path: Path, dtype: Any, how: Any) -> float:
    """Return how far the trainer's log-probabilities are from the engine's, the mean over tokens."""
    policy = PolicyConfig(
        model=ModelConfig(path=str(path)),
        fsdp_config=FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype=dtype)),
        experts=ExpertsConfig(router_replay=how),
    )
    trainer = TrainerConfig(policy=policy, algorithm=AlgorithmConfig(use_kl_loss=False))
    with joined() as world:
        (found_P,) = FsdpPolicy(trainer, 1.0, world).logprobs([samples.whole()])
    return (found_P - samples.rollout_logprobs)[samples.loss_mask > 0].abs().mean().item()


def ranks(rounds: int) -> None:
    """Pass with and without experts that all ranks share, in turns."""
    torch.set_num_threads(1)
    config, trained = mixture(64, 4, 512, 256, layers=3), AlgorithmConfig(use_kl_loss=False)
    with joined() as world, tempfile.TemporaryDirectory() as folder:
        path = Path(world.rank0_broadcast(lambda: folder))
        if world.first:
            AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
            print("| tokens of each rank | expert_parallel_size | MiB | processor seconds |\n|---|---|---|---|")
        world.barrier()
        engines = {size: sharing(path, size, trained, world) for size in (1, world.size)}
        for tokens in (256, 2048):
            group = make_group(1, tokens // 2, tokens // 2, config.vocab_size).whole()
            found: dict[int, list[tuple[float, float]]] = {size: [] for size in engines}
            for _ in range(rounds + 1):
                for size, engine in engines.items():
                    found[size].append(measured(partial(_train, engine, group, trained)))
                    engine.skip()
            for size, values in found.items():
                most = world.max([median(each[column] for each in values[1:]) for column in range(2)])
                if world.first:
                    print(f"| {tokens} | {size} | {most[0]:.0f} | {most[1]:.2f} |", flush=True)


def sharing(path: Path, size: int, algorithm: AlgorithmConfig, world: World) -> FsdpPolicy:
    fsdp = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"), expert_parallel_size=size)
    policy = PolicyConfig(model=ModelConfig(path=str(path)), fsdp_config=fsdp)
    return FsdpPolicy(TrainerConfig(policy=policy, algorithm=algorithm), 1.0, world)


def _train(engine: FsdpPolicy, batch: MicroBatch, algorithm: AlgorithmConfig) -> None:
    engine.forward_backward([batch], build_objective(algorithm))


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """Return the MiB that a pass adds, and its processor seconds."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, began = _memory("VmRSS"), time.process_time()
    run()
    dist.barrier()
    return (_memory("VmHWM") - before) / 1024, time.process_time() - began


def _memory(name: str) -> float:
    """Return the KiB that the kernel counts under this name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("kernels", "replay", "ranks"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    if options.only == "ranks":
        ranks(options.rounds)
        return
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if options.only != "replay":
        kernels(options.rounds)
    if options.only != "kernels":
        replay(options.samples)


if __name__ == "__main__":
    main()
