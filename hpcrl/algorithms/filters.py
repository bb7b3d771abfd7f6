"""What rewards of a group are named, and which groups are worth training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from statistics import mean

from hpcrl.config.sections.algorithm import OWN_REWARD
from hpcrl.errors import DataError
from hpcrl.types import GroupMeta


def filter_values(group: GroupMeta, metrics: Sequence[str]) -> list[float]:
    """Return the number of each sample that decides whether a group is worth training.

    Args:
        metrics: `trainer.algorithm.filter_reward_metric`, numbers that the environment reports, which are added up; a sample that
            does not report one that others of its group do has 0, and one that failed the mean of the others. Empty: the reward, the
            sum over a sample's tokens.

    Raises:
        DataError: no sample of the group reports one of the metrics.
    """
    if not metrics:
        return group.rewards
    named = [_neutral(group, reported(group, name, "filter_reward_metric")) for name in metrics]
    return [sum(values) for values in zip(*named, strict=True)]


def reported(group: GroupMeta, name: str, setting: str) -> list[float]:
    """Return what the environment reports of each sample under a name; 0 where it does of others of the group alone, or all have failed.

    Args:
        setting: of trainer.algorithm, that names it.

    Raises:
        DataError: no sample of the group reports it.
    """
    samples = group.env_metrics or [{} for _ in group.rewards]
    there = sorted({known for sample in samples for known in sample})
    if name not in there and any(reason != "failed" for reason in group.stop_reasons):
        raise DataError(
            f"group {group.group_id} (data source {group.data_source}): no sample has the metric {name!r}, which "
            f"trainer.algorithm.{setting} names; name metrics that the environment reports: it reports {', '.join(there) or 'none'}"
        )
    return [sample.get(name, 0.0) for sample in samples]


def named_rewards(group: GroupMeta, name: str) -> list[float]:
    """Return a reward that gdpo.rewards names, of each sample; one whose environment failed has the mean of the others, so that it moves no baseline.

    Raises:
        DataError: no sample of the group has it.
    """
    values = group.rewards if name == OWN_REWARD else reported(group, name, "gdpo.rewards")
    return _neutral(group, values)


def _neutral(group: GroupMeta, values: Sequence[float]) -> list[float]:
    """Return values with the mean of the others in the place of those that failed samples have; 0 where all failed."""
    scored = group.scored
    others = list(compress(values, scored))
    neutral = mean(others) if others else 0.0  # not fmean, by which three values of 0.1 have another mean
    return [value if one else neutral for value, one in zip(values, scored, strict=True)]


def varied(values: Sequence[float]) -> bool:
    """Return whether the rewards of a group, or what else it is judged by, differ, or it has no second sample to differ from.

    Otherwise every sample is as good as its group, so that estimators which compare within it find nothing to learn.
    """
    return len(values) == 1 or min(values) < max(values)
