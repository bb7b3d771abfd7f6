"""What an optimizer step costs with FSDP2 and with Megatron-core: tokens/s, model FLOP/s utilization, peak memory, one process each.

    python benchmarks/backends.py [--tokens N ...] [--micro-batches N] [--steps N] [--recompute] [--tiny]

The policy is a random Qwen3 of 0.6 billion parameters, made on the spot, in bf16; its micro-batches are packed samples of 2048 tokens. The
backends take turns, in new processes, and the first two steps, which allocate memory, are not counted. Megatron-core is alone too: tensor
parallel size 1. --tiny makes all of it small enough for a CPU, where its figures say nothing about a GPU.

hpcrl/trainer/models/flops.py says which FLOPs are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shared_prefixes import ALONE
from transformers import Qwen3Config, Qwen3ForCausalLM

from hpcrl.config import AlgorithmConfig, TrainerConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.flops import ModelFlops, peak_tflops
from hpcrl.types import MicroBatch

WARM = 2
_WHOLE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_TINY: dict[str, Any] = _WHOLE | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def make_model(place: Path, *, tiny: bool) -> None:
    config = Qwen3Config(**(_TINY if tiny else _WHOLE))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.bfloat16().save_pretrained(place)


def make_batch(lengths: list[int], vocabulary: int, weight: float) -> MicroBatch:
    """Return samples of these lengths, of which every token but the last of each is trained."""
    total = sum(lengths)
    ids = torch.randint(vocabulary, (total,))
    mask = torch.ones(total)
    mask[torch.tensor(lengths).cumsum(0) - 1] = 0
    return MicroBatch(
        token_ids=ids,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        lengths=lengths,
        labels=ids.roll(-1),
        loss_mask=mask,
        weights=mask * weight,
        nll_weights=torch.zeros(total),
        rollout_logprobs=torch.full((total,), -5.0),
        advantages=torch.randn(total),
    )


def measure(world: World, strategy: str, model: str, tokens: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return seconds per step (median), model FLOPs per second and bytes."""
    table = {
        "strategy": strategy,
        "policy": {"model": {"path": model}},
        "algorithm": {"use_kl_loss": False},
        "gradient_checkpointing": arguments.recompute,
    }
    config = Qwen3Config.from_pretrained(model)
    with torch.device("meta"):
        flops = ModelFlops.of(Qwen3ForCausalLM(config))
    engine = build_policy(build(TrainerConfig, table), 1.0, world)
    engine.schedule(WARM + arguments.steps)
    sample = min(tokens, 128 if arguments.tiny else 2048)
    step_tokens = tokens * arguments.micro_batches
    samples = step_tokens // sample
    lengths = [sample] * (tokens // sample)
    batches = [make_batch(lengths, config.vocab_size, 1 / step_tokens) for _ in range(arguments.micro_batches)]
    objective, took = build_objective(AlgorithmConfig(use_kl_loss=False)), []
    for _ in range(WARM + arguments.steps):
        began = time.monotonic()
        engine.forward_backward(batches, objective)
        report = engine.step()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        assert not report.skipped, f"the norm of the gradient is {report.grad_norm}"
        took.append(time.monotonic() - began)
    seconds = median(took[WARM:])
    return {
        "seconds": seconds,
        "tokens": step_tokens / seconds,
        "flops": flops.training([sample] * samples, step_tokens - samples) / seconds,
        "bytes": peak_memory(world.device),
    }


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_new_process(strategy: str, tokens: int, model: Path) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", strategy, str(tokens), str(model)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def row(name: str, tokens: int, found: dict[str, float], peak_flops: float | None) -> str:
    used = "-" if peak_flops is None else f"{100 * found['flops'] / peak_flops:.1f} %"
    memory = f"{found['bytes'] / 2**30:.2f}"
    return f"| {name} | {tokens} | {found['seconds']:.3f} | {found['tokens']:,.0f} | {used} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", help="of a micro-batch (default: 4096 16384; tiny: 512 1024)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of an optimizer step")
    parser.add_argument("--steps", type=int, default=20, help="that are measured")
    parser.add_argument("--recompute", action="store_true", help="activations are computed again in backward")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        strategy, tokens, model = arguments.one
        os.environ |= ALONE
        with joined() as world:
            print(json.dumps(measure(world, strategy, model, int(tokens), arguments)))
        return
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not arguments.tiny:
        parser.error("there is no GPU; expected one, or --tiny, which runs on a CPU")
    peak = peak_tflops(torch.cuda.get_device_name()) if on_gpu else None
    print(f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}")
    print("| backend | tokens of a micro-batch | s/step | tokens/s | MFU | peak GiB |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), tiny=arguments.tiny)
        for tokens in arguments.tokens or ([512, 1024] if arguments.tiny else [4096, 16384]):
            for strategy, name in (("fsdp2", "FSDP2"), ("megatron", "Megatron-core, TP 1")):
                found = in_new_process(strategy, tokens, Path(place))
                print(row(name, tokens, found, peak and peak * 1e12), flush=True)


if __name__ == "__main__":
    main()
