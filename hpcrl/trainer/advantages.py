"""What each token of a batch was worth: rewards become advantages, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from hpcrl.algorithms.advantages import (
    ESTIMATORS,
    Estimator,
    Outcomes,
    is_per_token,
    lambda_returns,
    normalize,
)
from hpcrl.algorithms.filters import filter_values, varied
from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.config.derive import needs_baselines
from hpcrl.config.own import find
from hpcrl.errors import ConfigError, DataError
from hpcrl.trainer.packing import Row
from hpcrl.types import Batch

Sum = Callable[[Sequence[float]], list[float]]
"""Gives the element-wise sums over all ranks: World.sum, or `list` where there is one rank."""


@dataclass(frozen=True)
class Advantages:
    """What is told of the advantages of all ranks.

    Attributes:
        mean, mean_abs: over all trained tokens, as the estimator gave them: before advantage_batch_normalize and clipping.
        penalties: what all samples together were charged for divergence from the reference.
    """

    mean: float
    mean_abs: float
    penalties: float


def trained_groups(batch: Batch, algorithm: AlgorithmConfig) -> list[int]:
    """Return which groups of the batch are trained: all, or with zero_variance_filter those whose rewards differ.

    The others are not even read, and no reduction of the loss counts them.

    Raises:
        DataError: a group lacks a metric of filter_reward_metric.
    """
    groups, metrics = range(len(batch.groups)), algorithm.filter_reward_metric
    if not algorithm.zero_variance_filter:
        return list(groups)
    return [at for at in groups if varied(filter_values(batch.groups[at], metrics))]


def estimate_advantages(batch: Batch, rows: Sequence[Row], algorithm: AlgorithmConfig, over_ranks: Sum) -> Advantages:
    """Fill in the advantages of this rank's samples, and the returns of a critic where they have values.

    Every rank calls it. An estimator that gives all tokens of a sample the same number gets every sample of the batch from the
    batch's metadata, the same on every rank; one that needs tokens gets this rank's, and sums over ranks. Where a sample has several
    rows, its turns, it counts once: with the outcome as its reward, less the penalties of all of them. Each of them then gets what the
    sample is worth.

    Args:
        rows: this rank's; together, ranks have those of all trained groups.

    Raises:
        ConfigError: a user's own estimator cannot be found, or the estimator needs all tokens of a sample in one row.
        DataError: a group lacks a greedy response that it is to be compared with, or a metric of filter_reward_metric.
    """
    estimator = find("trainer.algorithm.advantage_estimator", algorithm.advantage_estimator, ESTIMATORS)

    def total(sums: torch.Tensor) -> torch.Tensor:
        return sums.new_tensor(over_ranks(sums.tolist()))

    outcomes = _by_token(rows, total)
    mask_P, lengths = outcomes.mask_P, outcomes.lengths
    if is_per_token(estimator):
        _require_one_row(batch)
        raw_P = estimator(outcomes, algorithm)
    else:
        values_B = _by_sample(batch, rows, estimator, algorithm, over_ranks)
        raw_P = values_B.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    if outcomes.values_P is not None:
        returns_P = lambda_returns(outcomes, outcomes.values_P, algorithm.gamma, algorithm.lambd)
        for row, returns_T in zip(rows, returns_P.float().split(lengths), strict=True):
            row.returns = returns_T
    assert raw_P.shape == mask_P.shape, (
        f"{algorithm.advantage_estimator}: {tuple(raw_P.shape)} for {len(mask_P)} tokens"
    )
    raw_P = torch.where(mask_P > 0, raw_P.double(), 0.0)
    penalties = sum(row.penalties.sum().item() for row in rows if row.penalties is not None)
    summed, summed_abs, count, penalties = over_ranks(
        [raw_P.sum().item(), raw_P.abs().sum().item(), mask_P.sum().item(), penalties]
    )
    advantages_P = normalize(raw_P, mask_P, total) if algorithm.advantage_batch_normalize else raw_P
    low, high = algorithm.advantage_clip_low, algorithm.advantage_clip_high
    if low is not None or high is not None:
        advantages_P = advantages_P.clamp(low, high)
    for row, advantages_T in zip(rows, advantages_P.float().split(lengths), strict=True):
        row.advantages = advantages_T
    count = max(count, 1.0)
    return Advantages(summed / count, summed_abs / count, penalties)


def _require_one_row(batch: Batch) -> None:
    if any(count != 1 for group in batch.groups for count in group.rows):
        raise ConfigError(
            "generator.step_wise_trajectories: gae, reinforce++ and other estimators that are marked per_token follow rewards from "
            "token to token, and each row has one turn only; choose an advantage_estimator such as grpo or rloo"
        )


def _by_token(rows: Sequence[Row], total: Callable[[torch.Tensor], torch.Tensor]) -> Outcomes:
    """Return this rank's tokens."""
    # a critic says at each token what it expects before the next one
    values = [row.values[:-1] for row in rows if row.values is not None]
    assert len(values) in (0, len(rows)), "a critic has seen some samples, others not"
    return Outcomes(
        rewards_P=_joined([row.rewards for row in rows]),
        mask_P=_joined([row.trained for row in rows]),
        lengths=[len(row.sample.token_ids) for row in rows],
        groups_B=torch.tensor([row.pick.group for row in rows], dtype=torch.int64),
        # a rank without samples has no values either, whether there is a critic or not
        values_P=_joined([pad(values_T, (1, 0)).double() for values_T in values]) if len(values) == len(rows) else None,
        total=total,
    )


def _by_sample(
    batch: Batch, rows: Sequence[Row], estimator: Estimator, algorithm: AlgorithmConfig, over_ranks: Sum
) -> torch.Tensor:
    """Return one advantage for each of this rank's rows, from the rewards of all samples of the trained groups."""
    groups = trained_groups(batch, algorithm)
    places = [(group, index) for group in groups for index in range(len(batch.groups[group].rewards))]
    numbers = {place: number for number, place in enumerate(places)}
    owners = {group: batch.groups[group].owners for group in groups}
    mine = [numbers[row.pick.group, owners[row.pick.group][row.pick.index]] for row in rows]
    tokens, penalties = [0.0] * len(places), [0.0] * len(places)
    for place, row in zip(mine, rows, strict=True):
        tokens[place] += row.trained.sum().item()
        penalties[place] += 0.0 if row.penalties is None else row.penalties.sum().item()
    sums = torch.tensor(over_ranks([*tokens, *penalties]), dtype=torch.float64)
    tokens_B, penalties_B = sums.view(2, len(places))
    rewards_B = torch.tensor([batch.groups[group].rewards[index] for group, index in places], dtype=torch.float64)
    outcomes = Outcomes(
        rewards_P=rewards_B - penalties_B,
        mask_P=tokens_B,
        lengths=[1] * len(places),
        groups_B=torch.tensor([group for group, _ in places], dtype=torch.int64),
        baselines_B=_baselines(batch, places, algorithm) if needs_baselines(algorithm) else None,
    )
    return estimator(outcomes, algorithm)[mine]


def _baselines(batch: Batch, places: Sequence[tuple[int, int]], algorithm: AlgorithmConfig) -> torch.Tensor:
    """Return the reward of the greedy response to each sample's prompt, [B]."""
    for group in batch.groups:
        if group.baseline is None:
            raise DataError(
                f"group {group.group_id} was generated without a greedy response, which "
                f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} compares with; resume the run, and the "
                "group is generated again"
            )
    return torch.tensor([batch.groups[group].baseline for group, _ in places], dtype=torch.float64)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
