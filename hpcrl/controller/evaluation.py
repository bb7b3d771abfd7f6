"""When to evaluate, and what the scores are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hpcrl.types import GroupMeta


def is_due(version: int, total_steps: int, interval: int, before_train: bool) -> bool:
    """Tell whether the policy `version` is to be evaluated: before training, every `interval` steps, and at the end."""
    if interval <= 0:
        return False
    if version == 0:
        return before_train
    return version % interval == 0 or version == total_steps


def scores(groups: Sequence[GroupMeta]) -> dict[str, float]:
    """Return the evaluation metrics of each data source and of all together.

    A slash in the name of a source becomes an underscore. pass_at_k is the share of prompts of which any of the k samples was rewarded ("any of n", not the unbiased estimator).
    """
    sources: dict[str, list[GroupMeta]] = defaultdict(list)
    for group in groups:
        sources["all"].append(group)
        sources[group.data_source.replace("/", "_")].append(group)
    metrics = {}
    for source, members in sources.items():
        rewards = [reward for group in members for reward in group.rewards]
        k = len(members[0].rewards)
        metrics[f"eval/{source}/avg_score"] = sum(rewards) / len(rewards)
        metrics[f"eval/{source}/pass_at_{k}"] = sum(max(g.rewards) > 0 for g in members) / len(members)
        metrics[f"eval/{source}/mean_positive_reward"] = sum(max(r, 0.0) for r in rewards) / len(rewards)
    lengths = [length for group in groups for length in group.response_lengths]
    metrics["eval/all/generate/avg_num_tokens"] = sum(lengths) / len(lengths)
    return metrics
