"""What rewards of a group are named, and which groups are worth training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from hpcrl.config.sections.algorithm import OWN_REWARD
from hpcrl.errors import DataError
from hpcrl.types import GroupMeta


def filter_values(group: GroupMeta, metrics: Sequence[str]) -> list[float]:
    """Return the numbers that decide whether a group is worth training, of the samples that have a reward.

    Args:
        metrics: `trainer.algorithm.filter_reward_metric`, numbers that the environment reports, which are added up; a sample that
            does not report one that others of its group do has 0. Empty: the reward, the sum over a sample's tokens.

    Raises:
        DataError: no sample of the group reports one of the metrics.
    """
    named = [reported(group, name, "filter_reward_metric") for name in metrics] or [group.rewards]
    return [sum(values) for values in compress(zip(*named, strict=True), group.scored)]


def is_worth_training(group: GroupMeta, metrics: Sequence[str], tolerance: float = 0.0, *, turns: bool = False) -> bool:
    """Return whether samples of a group that have a reward differ in what they are judged by; `metrics` as of `filter_values`.

    Where the policy has roles and there are no metrics, they differ where those of any role do.

    A group of one sample is worth it where that has a reward, as there is no other to differ from; a single one left of several is not.

    Args:
        tolerance: what the highest may exceed the lowest by without a difference.
        turns: without metrics, samples of one reward are worth it too where rewards of their turns differ.
    """
    values = filter_values(group, metrics)
    judged = [values] if metrics or not group.roles else role_rewards(group)
    rewards = [turn.reward for sample in group.scored_samples for row in sample.turns for turn in row]
    if turns and rewards and not metrics:
        judged.append(rewards)
    return len(values) >= min(2, len(group.samples)) and any(varied(own, tolerance) for own in judged)


def role_rewards(group: GroupMeta) -> list[list[float]]:
    """Return for each role the rewards of its turns in each sample that has a reward, summed up; a role may lack in a sample."""
    found = dict[str, list[float]]()
    for sample in group.scored_samples:
        turns = [turn for row in sample.turns for turn in row]
        for role in dict.fromkeys(turn.role for turn in turns):
            found.setdefault(role, []).append(sum(turn.reward for turn in turns if turn.role == role))
    return list(found.values())


def share_without_spread(groups: Sequence[GroupMeta], dropped: int = 0) -> float | None:
    """Return the share of groups whose samples all have the same reward, those left out in which all samples failed; 1 of no groups.

    None: groups have one sample each, or all samples failed.

    Args:
        dropped: further groups that were generated, and left out because they are such.
    """
    rewarded = [group for group in groups if any(group.scored)]
    if groups and (not rewarded or all(len(group.samples) == 1 for group in groups)):
        return None
    count = len(rewarded) + dropped
    return (dropped + sum(not is_worth_training(group, ()) for group in rewarded)) / count if count else 1.0


def reported(group: GroupMeta, name: str, setting: str) -> list[float]:
    """Return what the environment reports of each sample under a name; 0 where it does of others of the group alone, or all have failed.

    Args:
        setting: of trainer.algorithm, that names it.

    Raises:
        DataError: no sample of the group reports it.
    """
    there = sorted({known for sample in group.samples for known in sample.env_metrics})
    if name not in there and any(sample.stop_reason != "failed" for sample in group.samples):
        raise DataError(
            f"group {group.group_id} (data source {group.data_source}): no sample has the metric {name!r}, which "
            f"trainer.algorithm.{setting} names; name metrics that the environment reports: it reports {', '.join(there) or 'none'}"
        )
    return [sample.env_metrics.get(name, 0.0) for sample in group.samples]


def named_rewards(group: GroupMeta, name: str) -> list[float]:
    """Return a reward that gdpo.rewards names, of each sample; what stands for one that failed means nothing.

    Raises:
        DataError: no sample of the group has it.
    """
    return group.rewards if name == OWN_REWARD else reported(group, name, "gdpo.rewards")


def varied(values: Sequence[float], tolerance: float = 0.0) -> bool:
    """Return whether the rewards of a group, or what else it is judged by, differ, or it has no second sample to differ from.

    Otherwise every sample is as good as its group, so that estimators which compare within it find nothing to learn.
    """
    return len(values) == 1 or max(values) - min(values) > tolerance
