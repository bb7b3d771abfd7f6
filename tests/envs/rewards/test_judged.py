"""What a reward model says later is added to rewards as if it had been there from the beginning."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.sections.environment import EnvironmentConfig, ScoringRewardModelConfig
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.envs.rewards.response import Response
from hpcrl.rollout.env_session import scorer_of
from hpcrl.types import GroupMeta
from tests.rows import group_meta

PLAIN = JudgedRewards(weight=1.0, clip_min=-5.0, clip_max=5.0)


def column(found: GroupMeta, name: str) -> list[Any]:
    return [getattr(sample, name) for sample in found.samples]


def group(**changes: Any) -> GroupMeta:
    known: dict[str, Any] = {
        "rewards": [1.0, 0.0, 0.5],
        "stop_reasons": ["stop", "stop", "length"],
        "env_metrics": [{"format": 1.0}, {"format": 0.0}, {"format": 1.0}],
    }
    return group_meta(
        group_id="g1", kind="train", replica=0, path="p", lengths=[5] * 3, response_lengths=[2] * 3, oldest_version=0,
        newest_version=0, data_source="x", seconds=0.1, **(known | changes),
    )  # fmt: skip


def test_without_an_environment_a_response_ends_and_is_worth_nothing_yet() -> None:
    alone = EnvironmentConfig(reward_model=ScoringRewardModelConfig(model="rm"))
    scorer = scorer_of(alone, "train")
    assert scorer is not None
    turn = scorer(Response(text="ab", ground_truth=None, n_tokens=2, max_tokens=4, messages=[], extras={}))
    assert (turn.reward, turn.done, turn.observations) == (0.0, True, [])
    assert scorer_of(alone, "eval") is None, "evaluation is played by the environment of its rows"
    both = EnvironmentConfig(reward_model=ScoringRewardModelConfig(model="rm", use_environment=True))
    assert scorer_of(both, "train") is None


def test_scores_are_clipped_weighted_and_added() -> None:
    section = ScoringRewardModelConfig(weight=0.5, clip_min=-2.0, clip_max=3.0)
    rewards = JudgedRewards.of(EnvironmentConfig(reward_model=section), stopped_only=False)
    found = rewards.complete(group(), [4.0, -9.0, 1.0])
    assert found.rewards == [1.0 + 1.5, 0.0 - 1.0, 0.5 + 0.5]
    assert column(found, "model_reward") == [1.5, -1.0, 0.5]
    assert column(found, "raw_reward") == found.rewards
    assert found.samples[1].env_metrics == {"format": 0.0, "reward_model": -9.0}, "the score itself"
    assert rewards.complete(group(env_metrics=[]), [1.0, 2.0, 3.0]).samples[2].env_metrics == {"reward_model": 3.0}


def test_a_response_that_did_not_end_has_no_reward_where_that_is_asked() -> None:
    rewards = JudgedRewards(1.0, -5.0, 5.0, stopped_only=True)
    found = rewards.complete(group(rewards=[1.0, 0.0, 0.0], raw_rewards=[1.0, 0.0, 0.5]), [1.0, 1.0, 1.0])
    assert found.rewards == [2.0, 1.0, 0.0]
    assert column(found, "raw_reward") == [2.0, 1.0, 1.5]


@pytest.mark.parametrize("why", ["its environment failed", "the reward model failed"])
def test_what_failed_counts_as_the_mean_of_the_others(why: str) -> None:
    environment = why.startswith("its")
    before = group(stop_reasons=["stop", "failed", "stop"] if environment else ["stop"] * 3)
    found = PLAIN.complete(before, [1.0, 4.0 if environment else None, 2.0])
    assert found.rewards == [2.0, (2.0 + 2.5) / 2, 2.5]
    assert column(found, "model_reward") == [1.0, 2.25 if environment else None, 2.0]


def test_a_group_at_which_it_fails_altogether_says_nothing() -> None:
    found = PLAIN.complete(group(), [None] * 3)
    assert found.rewards == [0.0] * 3
    assert column(found, "model_reward") == [None] * 3
    assert column(found, "env_metrics") == column(group(), "env_metrics")
