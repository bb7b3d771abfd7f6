"""Memory of a rank for a model that FSDP2 shards as a whole, counted by its parameters."""

from __future__ import annotations

from typing import Any

import torch

from hpcrl.config import Config
from hpcrl.planning.devices import GIB
from hpcrl.planning.memory import BYTES, Weight, fsdp_state
from hpcrl.trainer.models.trainable import mark_trained


def memory_of_parameters(config: Config, model: Any, copies: int) -> tuple[str, dict[str, int]]:
    """Return a text about the parameters of a model that is trained, and the bytes of a rank by what they hold.

    Args:
        copies: of what is trained, beside it.
    """
    policy, ranks = config.trainer.policy, config.trainer.placement.policy_ranks
    mark_trained(model, policy, torch.float32)
    weights = [Weight(name, tuple(each.shape), each.requires_grad) for name, each in model.named_parameters()]
    trained = sum(weight.count for weight in weights if weight.trained)
    everything = sum(weight.count for weight in weights)
    precision = policy.fsdp_config.mixed_precision
    frozen = precision.param_dtype if policy.model.lora.rank else precision.master_dtype
    optimizer = policy.optimizer_config
    need = fsdp_state(
        weights,
        ranks,
        precision.master_dtype,
        frozen_dtype=frozen,
        moments=optimizer.moments,
        muon=optimizer.name == "Muon",
        schedule_free=optimizer.name == "ScheduleFreeAdamW",
    )
    kept = copies * trained * BYTES[precision.master_dtype] // ranks
    parts = {"weights": need.weights + kept, "gradients and optimizer": need.gradients + need.optimizer}
    return f"{everything:,} parameters, {everything - trained:,} of them frozen", parts


def memory_line(parts: dict[str, int]) -> str:
    """Return the bytes of a rank as a line."""
    sizes = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in parts.items())
    return f"  memory of each rank, in GiB, for one copy of the parameters: {sizes}"
