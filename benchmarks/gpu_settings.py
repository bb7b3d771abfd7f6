"""What settings of the trainer cost and save on a GPU: tokens/s, model FLOP/s utilization, peak memory and the loss after some steps.

    python benchmarks/gpu_settings.py [--only NAME ...] [--steps N] [--micro-batches N] [--tiny]

The policy is the random Qwen3 of benchmarks/random_qwen3.py, in one process without others; micro-batches have 16384 packed tokens, but for the
row of one sample of 65536. Every row trains the same samples from the same weights, but for the rows of uneven lengths, which get others at
each step, as runs do. The first two steps, which compile and allocate, are not counted; seconds are medians. A row is printed when it is
there, and a setting whose package is missing says so. --tiny makes all of it small enough for a CPU, whose figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_qwen3 import ALONE, make_model, peak_memory
from transformers import Qwen3Config, Qwen3ForCausalLM

from hpcrl.config import AlgorithmConfig, TrainerConfig
from hpcrl.config.validate import build
from hpcrl.errors import HpcrlError
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.flops import ModelFlops, peak_tflops
from hpcrl.trainer.profiling.by_length import random_micro_batch

_WARM, _TOKENS, _TINY_TOKENS = 2, 16384, 256
_EVEN, _ONE, _UNEVEN, _LONG = "8 samples", "one sample", "uneven samples", "one of 4 times the tokens"
Found = dict[str, Any]
_SETTINGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "none": ((_EVEN, _UNEVEN, _ONE, _LONG), {}),
    "flash_attn = false": ((_EVEN, _UNEVEN, _ONE, _LONG), {"flash_attn": False}),
    "gradient_checkpointing = false": ((_EVEN,), {"gradient_checkpointing": False}),
    "gradient_checkpointing_keep": ((_EVEN, _ONE), {"gradient_checkpointing_keep": "attention"}),
    "logprobs_chunk_size = 4096": ((_EVEN,), {"logprobs_chunk_size": 4096}),
    "use_torch_compile": ((_EVEN,), {"policy": {"use_torch_compile": True}}),
    "compile_model, use_torch_compile": ((_EVEN, _UNEVEN, _ONE, _LONG), {"policy": {"use_torch_compile": True, "compile_model": True}}),
    "compile_model, use_torch_compile, flash_attn = false": (
        (_ONE, _LONG),
        {"flash_attn": False, "policy": {"use_torch_compile": True, "compile_model": True}},
    ),
    "the same, fp8": (
        (_EVEN,),
        {"policy": {"use_torch_compile": True, "compile_model": True, "low_precision": {"fp8": True}}},
    ),
    "activation_offload": ((_EVEN,), {"policy": {"activation_offload": True}}),
    "fsdp_config.cpu_offload": ((_EVEN,), {"policy": {"fsdp_config": {"cpu_offload": True}}}),
    "param_dtype = fp16": ((_EVEN,), {"policy": {"fsdp_config": {"mixed_precision": {"param_dtype": "fp16"}}}}),
    'moments = "8bit"': ((_EVEN,), {"policy": {"optimizer_config": {"moments": "8bit"}}}),
    "enable_liger_kernel": ((_EVEN,), {"policy": {"enable_liger_kernel": True}}),  # last: it changes the model's type
}  # fmt: skip


def lengths_of(shape: str, tokens: int, drawn: random.Random) -> list[int]:
    """Return the samples of a micro-batch."""
    if shape == _LONG:
        return [4 * tokens]
    if shape == _ONE:
        return [tokens]
    if shape == _EVEN:
        return [tokens // 8] * 8
    lengths = []
    while tokens - sum(lengths) > tokens // 64:
        lengths.append(min(drawn.randrange(tokens // 64, tokens // 4), tokens - sum(lengths)))
    return lengths


def measure(world: World, model: str, settings: Found, shape: str, given: argparse.Namespace) -> Found:
    config, tokens = Qwen3Config.from_pretrained(model), _TINY_TOKENS if given.tiny else _TOKENS
    with torch.device("meta"):
        flops = ModelFlops.of(Qwen3ForCausalLM(config))
    eager = {"compile_model": False, "use_torch_compile": False}
    policy = {**eager, **settings.get("policy", {}), "model": {"path": model}}
    engine = build_policy(
        build(TrainerConfig, {"algorithm": {"use_kl_loss": False}, **settings, "policy": policy}), 1.0, world
    )
    engine.schedule(100)
    objective = build_objective(AlgorithmConfig(policy_loss_type="cross_entropy", use_kl_loss=False))
    drawn, count = random.Random(0), 1 if shape == _LONG else given.micro_batches
    torch.manual_seed(0)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def micro_batches() -> list[Any]:
        all_lengths = [lengths_of(shape, tokens, drawn) for _ in range(count)]
        total = sum(map(sum, all_lengths))
        return [random_micro_batch(lengths, config.vocab_size, 1 / total) for lengths in all_lengths]

    batches, took, rates, loss = micro_batches(), [], [], 0.0
    for _ in range(_WARM + given.steps):
        began = time.monotonic()
        loss = engine.forward_backward(batches, objective)["final_loss"].item()
        engine.step()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.monotonic() - began)
        lengths = [length for batch in batches for length in batch.lengths]
        rates.append((sum(lengths) / took[-1], flops.training(lengths, sum(lengths) - len(lengths)) / took[-1]))
        batches = micro_batches() if shape == _UNEVEN else batches
    per_second, of_flops = (median(values) for values in zip(*rates[_WARM:], strict=True))
    peak = peak_tflops(torch.cuda.get_device_name()) if world.device.type == "cuda" else None
    return {
        "seconds": round(median(took[_WARM:]), 4),
        "first": round(took[0], 1),
        "tokens/s": round(per_second),
        "mfu": round(of_flops / peak / 1e12, 4) if peak else None,
        "gib": round(peak_memory(world.device) / 2**30, 2),
        "loss": round(loss, 4),
    }


def measured(run: Callable[[], Found]) -> Found:
    """Return the figures of a run, or the error that ended it."""
    try:
        return run()
    except (HpcrlError, RuntimeError) as error:
        return {"failed": str(error)[-400:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=_SETTINGS, default=list(_SETTINGS))
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--micro-batches", type=int, default=2, help="of an optimizer step")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.tiny:
        parser.error("there is no GPU; expected one, or --tiny, which runs on a CPU")
    os.environ |= ALONE
    with tempfile.TemporaryDirectory() as model, joined() as world:
        make_model(Path(model), tiny=given.tiny)
        device = torch.cuda.get_device_name() if not given.tiny else "CPU"
        print(json.dumps({"torch": torch.__version__, "device": device}))
        for name in given.only:
            shapes, settings = _SETTINGS[name]
            for shape in shapes:
                found = measured(lambda settings=settings, shape=shape: measure(world, model, settings, shape, given))
                print(json.dumps({"settings": name, "micro-batch": shape, **found}), flush=True)
                gc.collect()
                if world.device.type == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
