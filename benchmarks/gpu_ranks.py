"""Whether two ranks over NCCL compute what one does: FSDP2, experts that they share, tokens that they share. Prints one line of JSON.

    python benchmarks/gpu_ranks.py [--cpu]

Both ranks are on the one GPU: NCCL takes them for two nodes, as each has a host id of its own (NCCL_HOSTID), and sends over sockets. So this shows
what the collectives compute, and nothing of their speed. Each row has the norm of the gradient of two optimizer steps, in float32, by one rank and
by two; --cpu does the same over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hpcrl.config import AlgorithmConfig, TrainerConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.profiling.by_length import random_micro_batch
from hpcrl.types import MicroBatch

_LENGTHS, _VOCABULARY = [40, 24, 56, 8], 512
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
}  # fmt: skip
_LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "shared experts": {"fsdp_config": {"expert_parallel_size": 2}},
    "shared tokens": {"sequence_parallel_size": 2},
}
_ON_ONE_GPU = 'export LOCAL_RANK=0 NCCL_HOSTID=$RANK NCCL_SOCKET_IFNAME=lo; exec "$0" "$@"'


def sample(number: int) -> MicroBatch:
    torch.manual_seed(number)
    return random_micro_batch([_LENGTHS[number]], _VOCABULARY, 1 / sum(_LENGTHS))


def norms(world: World, model: Path, policy: dict[str, Any]) -> list[float]:
    """Return the norms of the gradient of two steps, in which each sample is trained once."""
    fsdp = {"mixed_precision": {"param_dtype": "fp32"}, **policy.get("fsdp_config", {})}
    table = {
        "policy": {**policy, "model": {"path": str(model)}, "fsdp_config": fsdp},
        "algorithm": {"use_kl_loss": False},
    }
    engine = build_policy(build(TrainerConfig, table), 1.0, world)
    engine.schedule(100)
    alone = "sequence_parallel_size" in policy or world.size == 1  # ranks that share tokens have the same samples
    mine = range(len(_LENGTHS)) if alone else range(world.rank, len(_LENGTHS), world.size)
    objective, found = build_objective(AlgorithmConfig(use_kl_loss=False)), []
    for _ in range(2):
        engine.forward_backward([sample(number) for number in mine], objective)
        found.append(engine.step().grad_norm)
    return found


def compute(model: Path, ranks: int) -> None:
    with joined() as world:
        found = {name: norms(world, model, policy if ranks > 1 else {}) for name, policy in _LAYOUTS.items()}
        if world.first:
            print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--compute", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compute:
        compute(Path(given.compute[0]), int(given.compute[1]))
        return
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if given.cpu else {})
    found: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as model:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES)).save_pretrained(model)
        for ranks in (1, 2):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            torchrun += ["--no-python", "sh", "-c", _ON_ONE_GPU]
            torchrun += [sys.executable, __file__, "--compute", model, str(ranks)]
            done = subprocess.run(torchrun, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[ranks] = json.loads(done.stdout.splitlines()[-1])
    rows = {name: {"one rank": found[1][name], "two ranks": found[2][name]} for name in _LAYOUTS}
    apart = max(abs(a - b) / a for row in rows.values() for a, b in zip(*row.values(), strict=True))
    print(json.dumps({**rows, "largest difference": apart}))
    sys.exit(apart > 1e-3)


if __name__ == "__main__":
    main()
