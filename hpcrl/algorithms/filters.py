"""Which groups are worth training."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.errors import DataError
from hpcrl.types import GroupMeta


def filter_values(group: GroupMeta, metrics: Sequence[str]) -> list[float]:
    """Return the number of each sample that decides whether a group is worth training.

    Args:
        metrics: `trainer.algorithm.filter_reward_metric`, numbers that the environment reports, which are added up; a sample that
            does not report one that others of its group do has 0. Empty: the reward, the sum over a sample's tokens.

    Raises:
        DataError: no sample of the group reports one of the metrics.
    """
    if not metrics:
        return group.rewards
    named = [reported(group, name, "filter_reward_metric") for name in metrics]
    return [sum(values) for values in zip(*named, strict=True)]


def reported(group: GroupMeta, name: str, setting: str) -> list[float]:
    """Return what the environment reports of each sample under a name; 0 where it does of others of the group alone.

    Args:
        setting: of trainer.algorithm, that names it.

    Raises:
        DataError: no sample of the group reports it.
    """
    there = sorted({known for sample in group.env_metrics for known in sample})
    if name not in there:
        raise DataError(
            f"group {group.group_id} (data source {group.data_source}): no sample has the metric {name!r}, which "
            f"trainer.algorithm.{setting} names; name metrics that the environment reports: it reports {', '.join(there) or 'none'}"
        )
    return [sample.get(name, 0.0) for sample in group.env_metrics]


def varied(values: Sequence[float]) -> bool:
    """Return whether the rewards of a group, or what else it is judged by, differ, or it has no second sample to differ from.

    Otherwise every sample is as good as its group, so that estimators which compare within it find nothing to learn.
    """
    return len(values) == 1 or min(values) < max(values)
