"""What it costs to compute activations again in backward, and what it saves, by the settings trainer.gradient_checkpointing*.

    python benchmarks/recompute.py [--tokens N] [--repetitions N] [--device cpu|cuda] [--tiny]

The policy is the one of benchmarks/shared_prefixes.py. A pass is forward and backward of the FSDP2 engine over one micro-batch of samples of 512
tokens. The kinds take turns in one process; times are medians, on the CPU of the processor time of one thread. Memory is what has been
allocated between the end of forward and the begin of backward, weights apart, and by how much it is at its highest in a pass: on the CPU both
by torch's memory tracker, in a pass of its own. `offload` needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shared_prefixes import ALONE, SIZES, make_group, run_pass
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import Qwen3Config, Qwen3ForCausalLM

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World, joined
from hpcrl.types import MicroBatch

_SAMPLE = 512
_KINDS: dict[str, dict[str, Any]] = {
    "nothing again": {"gradient_checkpointing": False},
    "every second layer": {"gradient_checkpointing_every": 2},
    "all but attention": {"gradient_checkpointing_keep": "attention"},
    "all": {},
    "all, offload": {"policy": {"activation_offload": True}},
}


def engine(model: Path, kind: str, dtype: str, world: World) -> PolicyEngine:
    table: dict[str, Any] = {"algorithm": {"use_kl_loss": False}, **_KINDS[kind]}
    table["policy"] = {
        "model": {"path": str(model)},
        "fsdp_config": {"mixed_precision": {"param_dtype": dtype}},
        **table.get("policy", {}),
    }
    return build_policy(build(TrainerConfig, table), 1.0, world)


def memory(policy: PolicyEngine, batch: MicroBatch, device: str) -> dict[str, float]:
    """Return MiB: at the end of forward, and at most."""
    owner: Any = policy
    held: list[int] = []
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        with _at_backward(lambda: held.append(torch.cuda.memory_allocated() - before)):
            torch.cuda.reset_peak_memory_stats()
            run_pass(policy, batch)
        most = torch.cuda.max_memory_allocated() - before
    else:
        tracker, own = MemTracker(), torch.device("cpu")
        tracker.track_external(owner._model)
        weights = sum(parameter.nbytes for parameter in owner._model.parameters())
        with (
            _at_backward(lambda: held.append(tracker.get_tracker_snapshot("current")[own]["Total"] - weights)),
            tracker,
        ):
            run_pass(policy, batch)
        most = tracker.get_tracker_snapshot("peak")[own]["Total"] - weights
    return {"kept_mib": round(held[0] / 2**20, 1), "peak_mib": round(most / 2**20, 1)}


class _at_backward:
    """Calls a function at the begin of each backward pass."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._backward = call, torch.Tensor.backward

    def __enter__(self) -> None:
        call, backward = self._call, self._backward

        def called(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            call()
            backward(tensor, *args, **options)

        torch.Tensor.backward = called  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *_: object) -> None:
        torch.Tensor.backward = self._backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a model for trying this script")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    os.environ.update(ALONE)
    sizes = SIZES["tiny" if options.tiny else options.device]
    dtype, clock = ("bf16", time.perf_counter) if options.device == "cuda" else ("fp32", time.process_time)
    config = Qwen3Config(**sizes, max_position_embeddings=8192, tie_word_embeddings=True)
    kinds = [kind for kind in _KINDS if options.device == "cuda" or "offload" not in kind]
    with tempfile.TemporaryDirectory() as place, joined() as world:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        (model.bfloat16() if dtype == "bf16" else model.float()).save_pretrained(place)
        batch = make_group(options.tokens // _SAMPLE, 64, _SAMPLE - 64, sizes["vocab_size"]).whole()
        engines = {kind: engine(Path(place), kind, dtype, world) for kind in kinds}
        took: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(options.repetitions + 1):
            for kind, policy in engines.items():
                began = clock()
                run_pass(policy, batch)
                if number:
                    took[kind].append(clock() - began)
        rows = {kind: {"seconds": median(took[kind]), **memory(engines[kind], batch, options.device)} for kind in kinds}
    first = rows[kinds[0]]
    for kind, row in rows.items():
        times = {f"{name}_ratio": round(row[name] / first[name], 3) for name in row}
        print(json.dumps({"kind": kind, **row, "seconds": round(row["seconds"], 3), **times}))


if __name__ == "__main__":
    main()
