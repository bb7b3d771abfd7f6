"""What ranks play that share the tokens of each sample."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.autograd.graph import saved_tensors_hooks

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import pack
from hpcrl.types import MicroBatch
from tests.trainer.critic_scenarios import one_batch
from tests.trainer.material import VOCABULARY, make_sample, with_mask
from tests.trainer.scenarios import main, make_engine, variants, whole


def kept(world: World, options: dict[str, Any]) -> None:
    """Tell how many bytes autograd keeps on this rank for passes of some tokens, by `sequence_parallel_size`."""
    found = {}
    for size in options["sizes"]:
        policy = {"sequence_parallel_size": size}
        engine = make_engine(world, options["model"], {"trainer": {"policy": policy, "logprobs_chunk_size": 4}})
        found[str(size)] = [_kept(engine, tokens) for tokens in options["tokens"]]
    Path(f"{options['out']}.{world.rank}").write_text(json.dumps(found))


def _kept(engine: FsdpPolicy, tokens: int) -> int:
    batch = pack([make_sample(torch.Generator().manual_seed(1), tokens, prompt=3)]).whole()
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward_backward([batch], lambda _, logprobs_P, *_others: (logprobs_P.sum(), {}))
    engine.skip()
    return sum(storage.nbytes() for storage in storages.values())


def passes(world: World, options: dict[str, Any]) -> None:
    """Compute one micro-batch with each model, which all ranks share, with and without gradients; rank 0 tells of outputs and gradients."""
    for name, model in options["models"].items():
        policy: dict[str, Any] = {
            "model": {"path": model["path"]},
            "sequence_parallel_size": world.size,
            "fsdp_config": {"mixed_precision": {"param_dtype": model.get("dtype", "fp32")}},
        }
        table = {"policy": policy, "mode": model.get("mode", "rl"), "algorithm": {"use_kl_loss": False}}
        engine: Any = build_policy(build(TrainerConfig, table | {"logprobs_chunk_size": 5}), 0.9, world)
        assert engine.data.size == 1
        samples = [make_sample(torch.Generator().manual_seed(at), length, 2) for at, length in enumerate((9, 14, 6))]
        batch = replace(pack(list(map(with_mask, samples))).whole(), top_k=3)
        seen = dict[str, torch.Tensor]()
        if "mode" in model:
            seen["values"], *_ = engine.values([batch])
        else:
            names = "logprobs", "ids", "top"
            seen |= dict(zip(names, next(iter(engine.top_logprobs([batch]))), strict=True))
            seen["probe"] = torch.tensor(engine.probe(samples[0].token_ids.tolist()))
            others = torch.stack([batch.labels, (batch.labels + 1) % VOCABULARY], 1)
            batch = replace(batch, teacher_ids=others.int())
        engine.forward_backward([batch], partial(weighted, seen))
        seen |= {f"gradient.{key}": whole(p.grad) for key, p in engine._model.named_parameters() if p.grad is not None}
        if world.first:
            save_file({key: value.contiguous() for key, value in seen.items()}, f"{options['out']}/{name}.{world.size}")


def weighted(
    seen: dict[str, torch.Tensor], _: MicroBatch, *outputs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of all outputs with random weights, as a loss; `seen` gets the outputs."""
    seen |= {f"output.{at}": value.detach() for at, value in enumerate(outputs)}
    draw = torch.Generator().manual_seed(2)
    terms = [(torch.randn(value.shape, generator=draw) * value).sum() for value in outputs]
    return torch.stack(terms).sum(), {}


if __name__ == "__main__":
    main({"passes": passes, "variants": variants, "one_batch": one_batch})
