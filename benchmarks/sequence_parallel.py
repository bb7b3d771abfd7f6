"""What each rank keeps, and how long passes take, where ranks share the tokens of each sample (trainer.policy.sequence_parallel_size).

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/sequence_parallel.py [--tokens N] [--repetitions N] [--tiny]

The policy is a random Qwen3 of 23 million parameters, of which 4 million are the embedding, made on the spot. Passes are forward and backward of
the FSDP2 engine over one sample for each rank: with size 1 each rank computes its own, with size S so many ranks compute S samples together,
one after the other. Sizes, all divisors of the ranks, take turns in one process. Activations are what autograd keeps of one sample for the
backward pass, without recomputation, each tensor's memory once; parameters, which do not grow with the tokens, are left out by a pass over half of
them. Seconds are medians of the wall clock, and mean something where ranks have cores or GPUs of their own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.shared_prefixes import make_group
from hpcrl.config import AlgorithmConfig, TrainerConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.loss import build_objective
from hpcrl.types import MicroBatch

_WHOLE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def make_engine(world: World, place: Path, size: int) -> PolicyEngine:
    dtype = "bf16" if world.device.type == "cuda" else "fp32"
    policy = {
        "model": {"path": str(place)},
        "sequence_parallel_size": size,
        "fsdp_config": {"mixed_precision": {"param_dtype": dtype}},
    }
    table = {"policy": policy, "algorithm": {"use_kl_loss": False}, "gradient_checkpointing": False}
    return build_policy(build(TrainerConfig, table), 1.0, world)


def run_passes(engine: PolicyEngine, batch: MicroBatch, count: int) -> None:
    engine.forward_backward([batch] * count, build_objective(AlgorithmConfig(use_kl_loss=False)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    engine.skip()


def kept(engine: PolicyEngine, batch: MicroBatch) -> int:
    """Return the bytes that autograd keeps for the backward pass."""
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    sizes = dict[int, int]()
    with saved_tensors_hooks(keep, lambda tensor: tensor):

        def objective(
            _: MicroBatch, logprobs_P: torch.Tensor, *_others: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            sizes.update({at: storage.nbytes() for at, storage in found.items()})
            return logprobs_P.sum(), {}

        engine.forward_backward([batch], objective)
    engine.skip()
    return sum(sizes.values())


def measure(world: World, place: Path, arguments: argparse.Namespace, vocabulary: int) -> dict[int, dict[str, float]]:
    sizes = [size for size in range(1, world.size + 1) if world.size % size == 0]
    engines = {size: make_engine(world, place, size) for size in sizes}
    half, whole = (
        make_group(1, tokens // 2, tokens // 2, vocabulary).whole()
        for tokens in (arguments.tokens // 2, arguments.tokens)
    )
    found: dict[int, dict[str, float]] = {}
    for size, engine in engines.items():
        bytes_of = 2 * (kept(engine, whole) - kept(engine, half))
        least, most = -world.max([-bytes_of])[0], world.max([bytes_of])[0]
        found[size] = {"activations_mib_least": round(least / 2**20, 2), "activations_mib_most": round(most / 2**20, 2)}
    took: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(arguments.repetitions + 1):
        for size, engine in engines.items():
            world.barrier()
            began = time.perf_counter()
            run_passes(engine, whole, size)
            world.barrier()
            if number:
                took[size].append(time.perf_counter() - began)
    return {size: {**facts, "seconds": round(median(took[size]), 4)} for size, facts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sample, half of which are trained")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    sizes = _TINY if arguments.tiny else _WHOLE
    torch.set_num_threads(1)
    with joined() as world, tempfile.TemporaryDirectory() as folder:
        place = Path(world.rank0_broadcast(lambda: folder))
        if world.first:
            torch.manual_seed(0)
            config = Qwen3Config(**sizes, max_position_embeddings=1 << 18, tie_word_embeddings=True)
            Qwen3ForCausalLM(config).float().save_pretrained(place)
        world.barrier()
        found = measure(world, place, arguments, sizes["vocab_size"])
        if world.first:
            for size, facts in found.items():
                print(
                    json.dumps(
                        {"sequence_parallel_size": size, "ranks": world.size, "tokens": arguments.tokens, **facts}
                    )
                )
        world.barrier()


if __name__ == "__main__":
    main()
