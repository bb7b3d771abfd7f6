"""Scores of a reward service: summed, weighted, clipped, then scaled."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcrl.config.environment import RemoteRewardConfig
from hpcrl.envs.rewards.service import service_rewards, service_scores
from hpcrl.errors import DataError

REPLY = {"x": [0.25, 5.0, -3.0], "y": [0.5, 1.0, -4.0]}


def test_scores_of_several_keys_are_added_and_bounded() -> None:
    assert service_scores(REPLY, "x") == [0.25, 5.0, -3.0]
    assert service_scores(REPLY, "x+y") == [0.75, 6.0, -7.0]
    assert service_scores(REPLY, "x+y+x", -5.0, 2.0) == [1.0, 2.0, -5.0]


@pytest.mark.parametrize(
    ("reply", "key", "words"),
    [
        ({"x": [1.0]}, "x+z", r"sent no score 'z' \(score_key=x\+z\); it sent x"),
        ({"x": [1.0], "y": [1.0, 2.0]}, "x+y", r"sent \[1, 2\] scores"),
        ({"x": [math.nan]}, "x", "sent nan as x"),
        ({"x": [math.inf], "y": [-math.inf]}, "x+y", "sent nan"),
    ],
)
def test_a_reply_that_cannot_be_used(reply: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        service_scores(reply, key)


def test_the_sum_is_weighted_clipped_and_then_scaled() -> None:
    config = RemoteRewardConfig(reward_function={"a": 0.5, "b": 2.0}, clip_min=-1.0, clip_max=3.0, scale=10.0)
    assert service_rewards({"b": [1.0, 1.0, -9.0], "a": [1.0, 4.0, 0.0]}, config) == [25.0, 30.0, -10.0]
    assert service_rewards({"a": [], "b": []}, config) == []


@pytest.mark.parametrize("scores", [{}, {"a": [1.0]}, {"a": [1.0], "b": [1.0], "c": [1.0]}])
def test_scores_of_other_functions(scores: dict[str, list[float]]) -> None:
    with pytest.raises(DataError, match=r"expected scores of a, b \(environment.remote_reward.reward_function\)"):
        service_rewards(scores, RemoteRewardConfig(reward_function={"a": 0.5, "b": 2.0}))
