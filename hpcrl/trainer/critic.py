"""The critic beside the policy: values before a batch is trained, and its own optimizer steps on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hpcrl.algorithms.losses import masked_sum
from hpcrl.algorithms.reductions import Reduction, weighted_sum
from hpcrl.algorithms.values import clipped_value_loss
from hpcrl.config.trainer import TrainerConfig
from hpcrl.run.fault import fault
from hpcrl.trainer.engine import CriticEngine, Objective
from hpcrl.trainer.plan import Limit, longest_first
from hpcrl.trainer.update import Between, MiniBatch, Trained, fill_in, weigh
from hpcrl.trainer.world import World
from hpcrl.types import Batch, MicroBatch

_REDUCTION = Reduction("sequence_mean")
_LEAST_VARIANCE = 1e-8


def critic_updates_per_batch(trainer: TrainerConfig) -> int:
    """Return the optimizer steps that the critic makes in one full batch."""
    return -(-trainer.train_batch_size // trainer.critic_mini_batch_size) * trainer.update_epochs_per_batch


def appraise(critic: CriticEngine, mini: MiniBatch, limit: Limit, between: Between = fault) -> None:
    """Fill in what the critic expects before each token."""
    fill_in(mini, limit, {"values": critic.values}, between)


def critic_mini_batches(
    minis: Sequence[MiniBatch], batch: Batch, trainer: TrainerConfig, limit: Limit, data: World
) -> list[MiniBatch]:
    """Return what each optimizer step of the critic trains in one pass over a batch, weighed.

    Args:
        minis: the policy's mini-batches, whose rows have values and returns.
        limit: of the micro-batches that are trained.
    """
    own = regrouped(minis, len(batch.groups), trainer.critic_mini_batch_size)
    weigh(own, batch, limit, data, _REDUCTION)
    return own


def regrouped(minis: Sequence[MiniBatch], groups: int, size: int) -> list[MiniBatch]:
    """Return mini-batches of `size` of the batch's groups each: samples stay on the rank that read them."""
    found = []
    for start in range(0, groups, size):
        chosen = range(start, start + size)
        rows = [replace(row) for mini in minis for row in mini.rows if row.pick.group in chosen]
        shares = [
            sorted((pick for mini in minis for pick in mini.shares[rank] if pick.group in chosen), key=longest_first)
            for rank in range(len(minis[0].shares))
        ]
        found.append(MiniBatch(sorted(rows, key=lambda row: longest_first(row.pick)), shares, minis[0].rank))
    return found


def build_critic_objective(value_clip: float) -> Objective:
    """Return what turns a micro-batch and the critic's values [P] into loss and metric sums."""

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


def describe_critic(updates: Sequence[Trained]) -> dict[str, float]:
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
