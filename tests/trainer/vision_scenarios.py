"""What two ranks do with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import pack
from hpcrl.types import MicroBatch
from tests.rows import read_tensors
from tests.trainer.scenarios import make_engine, whole


def unequal(world: World, options: dict[str, Any]) -> None:
    """Compute gradients where one rank has all images, and tell them whole; then where no rank has any."""
    precision = {"param_dtype": options["dtype"]}
    trainer = {"policy": {"fsdp_config": {"mixed_precision": precision}}}
    engine = make_engine(world, options["model"], {"trainer": trainer})
    rows = read_tensors(Path(options["group"]))
    plain = [row for row in rows if not row.tensors]

    def objective(batch: MicroBatch, logprobs_P: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return (logprobs_P * batch.loss_mask).sum(), {}

    for name, own in {
        "mixed": [row for row in rows if row.tensors] if world.first else plain,
        "plain": plain,
    }.items():
        engine.forward_backward([pack(own).whole()], objective)  # pyright: ignore[reportArgumentType]
        found = {key: whole(each.grad) for key, each in engine._model.model.named_parameters()}
        engine.skip()
        if world.first:
            save_file(found, f"{options['out']}-{name}")
