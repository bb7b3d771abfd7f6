"""What each token of a batch was worth: rewards become advantages, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpcrl.algorithms.advantages import ESTIMATORS, Estimator, Outcomes, is_per_token, normalize
from hpcrl.algorithms.filters import varied
from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.config.own import find
from hpcrl.trainer.packing import Row
from hpcrl.types import Batch

Sum = Callable[[Sequence[float]], list[float]]
"""Gives the element-wise sums over all ranks: World.sum, or `list` where there is one rank."""


@dataclass(frozen=True)
class Advantages:
    """What is told of the advantages of all ranks.

    Attributes:
        mean, mean_abs: over all trained tokens, as the estimator gave them: before advantage_batch_normalize and clipping.
    """

    mean: float
    mean_abs: float


def trained_groups(batch: Batch, algorithm: AlgorithmConfig) -> list[int]:
    """Return which groups of the batch are trained: all, or with zero_variance_filter those whose rewards differ.

    The others are not even read, and no reduction of the loss counts them.
    """
    groups = range(len(batch.groups))
    return [at for at in groups if not algorithm.zero_variance_filter or varied(batch.groups[at].rewards)]


def estimate_advantages(batch: Batch, rows: Sequence[Row], algorithm: AlgorithmConfig, over_ranks: Sum) -> Advantages:
    """Fill in the advantages of this rank's samples.

    Every rank calls it. An estimator that gives all tokens of a sample the same number gets every sample of the batch from the
    batch's metadata, the same on every rank; one that needs tokens gets this rank's, and sums over ranks.

    Args:
        rows: this rank's samples; together, ranks have those of all trained groups.

    Raises:
        ConfigError: a user's own estimator cannot be found.
    """
    estimator = find("trainer.algorithm.advantage_estimator", algorithm.advantage_estimator, ESTIMATORS)

    def total(sums: torch.Tensor) -> torch.Tensor:
        return sums.new_tensor(over_ranks(sums.tolist()))

    lengths = [len(row.sample.token_ids) for row in rows]
    mask_P = _joined([row.trained for row in rows])
    if is_per_token(estimator):
        rewards_P = _joined([row.rewards for row in rows])
        groups_B = torch.tensor([row.pick.group for row in rows], dtype=torch.int64)
        raw_P = estimator(Outcomes(rewards_P, mask_P, lengths, groups_B, total=total), algorithm)
    else:
        values_B = _by_sample(batch, rows, estimator, algorithm, over_ranks)
        raw_P = values_B.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    assert raw_P.shape == mask_P.shape, (
        f"{algorithm.advantage_estimator}: {tuple(raw_P.shape)} for {len(mask_P)} tokens"
    )
    raw_P = torch.where(mask_P > 0, raw_P.double(), 0.0)
    summed, summed_abs, count = over_ranks([raw_P.sum().item(), raw_P.abs().sum().item(), mask_P.sum().item()])
    advantages_P = normalize(raw_P, mask_P, total) if algorithm.advantage_batch_normalize else raw_P
    low, high = algorithm.advantage_clip_low, algorithm.advantage_clip_high
    if low is not None or high is not None:
        advantages_P = advantages_P.clamp(low, high)
    for row, advantages_T in zip(rows, advantages_P.float().split(lengths), strict=True):
        row.advantages = advantages_T
    count = max(count, 1.0)
    return Advantages(summed / count, summed_abs / count)


def _by_sample(
    batch: Batch, rows: Sequence[Row], estimator: Estimator, algorithm: AlgorithmConfig, over_ranks: Sum
) -> torch.Tensor:
    """Return one advantage for each of this rank's samples, from the rewards of all samples of the trained groups."""
    groups = trained_groups(batch, algorithm)
    places = [(group, index) for group in groups for index in range(len(batch.groups[group].rewards))]
    numbers = {place: number for number, place in enumerate(places)}
    mine = [numbers[row.pick.group, row.pick.index] for row in rows]
    tokens, penalties = [0.0] * len(places), [0.0] * len(places)
    for place, row in zip(mine, rows, strict=True):
        tokens[place] = row.trained.sum().item()
        penalties[place] = 0.0 if row.penalties is None else row.penalties.sum().item()
    sums = torch.tensor(over_ranks([*tokens, *penalties]), dtype=torch.float64)
    tokens_B, penalties_B = sums.split(len(places))
    rewards_B = torch.tensor([batch.groups[group].rewards[index] for group, index in places], dtype=torch.float64)
    outcomes = Outcomes(
        rewards_P=rewards_B - penalties_B,
        mask_P=tokens_B,
        lengths=[1] * len(places),
        groups_B=torch.tensor([group for group, _ in places], dtype=torch.int64),
    )
    return estimator(outcomes, algorithm)[mine]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
