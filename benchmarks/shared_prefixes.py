"""What the samples of a group cost in training with their common prompt computed once, beside samples that are computed whole.

    python benchmarks/shared_prefixes.py [--samples N] [--prompt N] [--answer N] [--repetitions N] [--device cpu|cuda] [--tiny]

The policy is a random Qwen3 of 23 million parameters, of which 4 million are the embedding, made on the spot; on a GPU one of 0.6 billion in
bf16. A pass is forward and backward of the FSDP2 engine over one micro-batch: one group. Both kinds take turns in one process; times are
medians, on the CPU of the processor time of one thread. Tokens per second are those of the samples, each with its prompt. Activations are what
autograd keeps for backward, each tensor's memory once; the peak is how far the memory of a new process of each kind rises in a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from hpcrl.config import AlgorithmConfig, TrainerConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import joined
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.packing import PackedSamples, pack
from hpcrl.types import MicroBatch, Sample

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}
_KINDS = ("whole", "shared")
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64,
    },
    "cuda": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8,
    },
}  # fmt: skip


def make_group(samples: int, prompt: int, answer: int, vocabulary: int) -> PackedSamples:
    """Return the samples of one prompt, of which the answers are trained."""
    draw = torch.Generator().manual_seed(0)
    begin = torch.randint(vocabulary, (prompt,), generator=draw)
    mask_T = (torch.arange(prompt + answer) >= prompt).float()
    made = []
    for _ in range(samples):
        ids = torch.cat([begin, torch.randint(vocabulary, (answer,), generator=draw)])
        made.append(Sample(ids, mask_T, -5 * mask_T, mask_T.int() - 1, torch.zeros(len(ids)), "stop"))
    packed = pack(made)
    packed.weights = [1 / (samples * answer)] * samples
    packed.scores.advantages = torch.randn(len(packed.token_ids), generator=draw)
    return packed


def micro_batches(packed: PackedSamples) -> dict[str, MicroBatch]:
    """Return the group as a micro-batch of each kind."""
    whole = packed.whole()
    packed.share_prefixes()
    return dict(zip(_KINDS, (whole, packed.whole()), strict=True))


@contextmanager
def engine(device: str, sizes: str) -> Iterator[PolicyEngine]:
    config = Qwen3Config(**SIZES[sizes], max_position_embeddings=8192, tie_word_embeddings=True)
    dtype = "bf16" if device == "cuda" else "fp32"
    with tempfile.TemporaryDirectory() as place, joined() as world:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        (model.bfloat16() if device == "cuda" else model.float()).save_pretrained(place)
        table = {
            "policy": {"model": {"path": place}, "fsdp_config": {"mixed_precision": {"param_dtype": dtype}}},
            "algorithm": {"use_kl_loss": False},
            "gradient_checkpointing": False,
            "shared_prefixes": True,
        }
        yield build_policy(build(TrainerConfig, table), 1.0, world)


def run_pass(policy: PolicyEngine, batch: MicroBatch) -> None:
    policy.forward_backward([batch], build_objective(AlgorithmConfig(use_kl_loss=False)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    policy.skip()


def kept(policy: PolicyEngine, batch: MicroBatch) -> int:
    """Return the bytes that autograd keeps for the backward pass, those of parameters apart."""
    engine: Any = policy
    held = {parameter.untyped_storage().data_ptr() for parameter in engine._model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run_pass(policy, batch)
    return sum(found.values())


def seconds(policy: PolicyEngine, batches: dict[str, MicroBatch], repetitions: int) -> dict[str, float]:
    """Return the median duration of a pass of each kind."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    took: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(repetitions + 1):
        for kind, batch in batches.items():
            began = clock()
            run_pass(policy, batch)
            if number:
                took[kind].append(clock() - began)
    return {kind: median(durations) for kind, durations in took.items()}


def peak(policy: PolicyEngine, batch: MicroBatch) -> int:
    """Return by how many bytes memory rises in a pass."""
    run_pass(policy, make_group(2, 8, 8, 64).whole())  # libraries have memory of their own
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_pass(policy, batch)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    before = _status("VmRSS")
    run_pass(policy, batch)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def peak_of_process(kind: str) -> int:
    """Return what a new process of this script tells."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peak", kind]
    done = subprocess.run(command, env={**os.environ, **_GIVE_BACK}, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"samples": 8, "prompt": 512, "answer": 128, "repetitions": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--peak", choices=_KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {name: os.environ.get(name, value) for name, value in ALONE.items()}
    sizes = "tiny" if arguments.tiny else arguments.device
    packed = make_group(arguments.samples, arguments.prompt, arguments.answer, SIZES[sizes]["vocab_size"])
    batches = micro_batches(packed)
    with engine(arguments.device, sizes) as policy:
        if arguments.peak:
            print(peak(policy, batches[arguments.peak]))
            return
        took = seconds(policy, batches, arguments.repetitions)
        activations = {kind: kept(policy, batch) for kind, batch in batches.items()}
    peaks, tokens = {kind: peak_of_process(kind) for kind in _KINDS}, len(packed.token_ids)
    rows = {
        "tokens/s": {kind: tokens / took[kind] for kind in _KINDS},
        "activations, MiB": {kind: activations[kind] / 2**20 for kind in _KINDS},
        "peak of a pass, MiB": {kind: peaks[kind] / 2**20 for kind in _KINDS},
    }
    print(
        f"{arguments.samples} samples of a prompt of {arguments.prompt} tokens and {arguments.answer} more, {tokens} tokens in all"
    )
    print(json.dumps({name: {kind: round(value, 1) for kind, value in row.items()} for name, row in rows.items()}))
    print("| | whole | shared | shared / whole |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['whole']:,.0f} | {row['shared']:,.0f} | {row['shared'] / row['whole']:.2f} |")


if __name__ == "__main__":
    main()
