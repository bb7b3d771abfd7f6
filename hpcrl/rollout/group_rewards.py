"""Rewards of whole groups: what they read of finished samples, and the rows with their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcrl.envs.base import Messages
from hpcrl.envs.rewards.grouped import WeightedGroupRewards
from hpcrl.envs.rewards.response import GroupSample, truth_of
from hpcrl.rollout.group import sample_reward
from hpcrl.types import Prompt, Row


def group_sample(prompt: Prompt, rows: Sequence[Row], conversation: Messages, max_tokens: int) -> GroupSample:
    """Return a sample as group rewards see it.

    Args:
        rows: of the sample; the outcome, which the last one has, is the reward.
        conversation: the messages after the prompt.
        max_tokens: of each turn.
    """
    texts = [message["content"] for message in conversation if message["role"] == "assistant"]
    return GroupSample(
        text=(texts[-1] if texts else "") or "",
        ground_truth=truth_of(prompt.extras),
        data_source=prompt.data_source,
        n_tokens=sum(int((row.versions >= 0).sum()) for row in rows),
        max_tokens=max_tokens,
        messages=prompt.messages,
        extras=prompt.extras,
        reward=sample_reward(rows),
        metrics=rows[-1].env_metrics,
        conversation=conversation,
        stop_reason=rows[-1].stop_reason,
    )


def with_group_rewards(rows: Sequence[Row], values: Mapping[str, float], rewards: WeightedGroupRewards) -> list[Row]:
    """Return the rows of a sample with the weighted sum of its group rewards: its own, by turns, times their weight, and the rest at the end.

    Args:
        values: of each group reward, which are reported.
    """
    found = [_with(row, row.rewards * rewards.own_weight, values) for row in rows]
    found[-1].rewards[-1] += rewards.added(values)
    return found


def _with(row: Row, rewards_T: Any, values: Mapping[str, float]) -> Row:
    return replace(row, rewards=rewards_T, env_metrics={**row.env_metrics, **values})
