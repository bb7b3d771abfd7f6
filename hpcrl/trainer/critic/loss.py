"""The critic beside the policy: its loss and its metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcrl.algorithms.losses import masked_sum
from hpcrl.algorithms.reductions import Reduction, weighted_sum
from hpcrl.algorithms.values import clipped_value_loss
from hpcrl.trainer.backends.base import Objective, UpdateResult
from hpcrl.types import MicroBatch

CRITIC_REDUCTION = Reduction("sequence_mean")
_LEAST_VARIANCE = 1e-8


def build_critic_objective(value_clip: float) -> Objective:
    """Return the critic's objective: a micro-batch and values [P] give loss and metric sums."""

    def objective(batch: MicroBatch, values_P: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert batch.values is not None
        assert batch.returns is not None
        old_P, returns_P, mask_P = batch.values, batch.returns, batch.loss_mask
        loss_P, metrics = clipped_value_loss(values_P, old_P, returns_P, mask_P, value_clip=value_clip)
        loss, exact_P, errors_P = weighted_sum(loss_P, batch.weights), returns_P.double(), returns_P.double() - old_P
        sums = metrics | {
            "tokens": mask_P.sum(),
            "loss": loss,
            "values": masked_sum(values_P, mask_P),
            "returns": masked_sum(exact_P, mask_P),
            "returns_squared": masked_sum(exact_P.square(), mask_P),
            "errors": masked_sum(errors_P, mask_P),
            "errors_squared": masked_sum(errors_P.square(), mask_P),
        }
        return loss, {name: value.detach() for name, value in sums.items()}

    return objective


def describe_critic(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Return critic/* of all optimizer steps: loss, learning rate and gradient norm averaged over them, means over tokens of all else.

    explained_variance is 1 - Var(R - V) / Var(R) with the values from before the batch was trained: 1 is perfect, 0 is as good as a
    constant. It is left out where returns are all equal.
    """
    sums = {name: sum(update.sums[name] for update in updates) for name in updates[0].sums}
    steps, tokens = len(updates), max(sums["tokens"], 1.0)
    described = {
        "critic/critic_loss": sums["loss"] / steps,
        "critic/critic_lr": sum(update.report.lr for update in updates) / steps,
        "critic/grad_norm": sum(update.report.grad_norm for update in updates) / steps,
        "critic/skipped_updates": float(sum(update.report.skipped for update in updates)),
        "critic/values_mean": sums["values"] / tokens,
        "critic/returns_mean": sums["returns"] / tokens,
        "critic/values_clipfrac": sums["clipfrac"] / tokens,
    }
    unexplained, variance = (
        sums[f"{name}_squared"] / tokens - (sums[name] / tokens) ** 2 for name in ("errors", "returns")
    )
    if variance > _LEAST_VARIANCE:
        described["critic/explained_variance"] = 1 - unexplained / variance
    return described
