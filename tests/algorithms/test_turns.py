"""Estimators of turns and roles: by hand in float64, and where they are grpo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from hpcrl.algorithms.advantages import ESTIMATORS, AdvantageInputs
from hpcrl.algorithms.settings import configured
from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.functions import GigpoConfig, RaeConfig

TURNS = [[0.0, 1.0], [0.0, 0.0, 0.0], [2.0], [1.0, 3.0]]  # rewards
STATES = [[0, 1], [0, 2, 1], [0], [3, 4]]
GROUPS = [0, 0, 0, 1]
ROOT = math.sqrt(0.5)


def inputs(
    turns: Sequence[Sequence[float]] = TURNS,
    states: Sequence[Sequence[int]] = STATES,
    groups: Sequence[int] = GROUPS,
    kinds: Sequence[str] = (),
    **more: Any,
) -> AdvantageInputs:
    flat = [reward for own in turns for reward in own]
    return AdvantageInputs(
        rewards_P=torch.tensor(flat, dtype=torch.float64),
        mask_P=torch.full((len(flat),), 3.0, dtype=torch.float64),
        lengths=[len(own) for own in turns],
        groups_B=torch.tensor(groups),
        anchors_P=torch.tensor([state for own in states for state in own]),
        kinds_B=kinds or ["x"] * len(turns),
        **more,
    )


def estimate(name: str, given: AdvantageInputs, **settings: Any) -> list[float]:
    return configured("advantage_estimator", name, ESTIMATORS, AlgorithmConfig(**settings))(given).tolist()


# By hand.


def test_turn_grpo_adds_up_what_the_turns_from_one_on_have_over_their_group() -> None:
    """The six turns of the first group have the mean 0.5 and, with the squares 0.25 x 5 + 2.25, the deviation sqrt(0.7)."""
    centered = [0.0, 0.5, -1.5, -1.0, -0.5, 1.5]
    alone = [4.0, 3.0]  # nothing to compare with
    found = estimate("turn_grpo", inputs(), grpo_norm_by_std=False)
    assert found == pytest.approx([*centered, *alone])
    scale = math.sqrt(0.7) + 1e-6
    expected = [*(value / scale for value in centered), *(value / (1 + 1e-6) for value in alone)]
    assert estimate("turn_grpo", inputs()) == pytest.approx(expected)


def test_turn_returns_are_discounted_by_turns() -> None:
    found = estimate("turn_returns", inputs(), gamma=0.5)
    assert found == pytest.approx([0.5, 1.0, 0.0, 0.0, 0.0, 2.0, 2.5, 3.0])
    assert estimate("turn_returns", inputs([[0.0, 0.0, 1.0]], [[0, 1, 2]], [0]), gamma=0.95) == pytest.approx(
        [0.95**2, 0.95, 1.0]
    )


def test_gigpo_adds_the_turns_in_the_same_state() -> None:
    """With gamma 0.5 the turns are worth 0.5, 1, 0, 0, 0 and 2. In state 0 these are 0.5, 0 and 2, in state 1 they are 1 and 0."""
    episodes = [0.0, 0.0, -1.0, -1.0, -1.0, 1.0, 4.0, 4.0]  # of 1, 0 and 2; of 4 alone
    mean = 2.5 / 3
    steps = [0.5 - mean, 0.5, -mean, 0.0, -0.5, 2 - mean, 0.0, 0.0]
    found = estimate("gigpo", inputs(), gamma=0.5, grpo_norm_by_std=False)
    assert found == pytest.approx([one + other for one, other in zip(episodes, steps, strict=True)])
    weighed = GigpoConfig(step_weight=3.0, episode_weight=0.5)
    found = estimate("gigpo", inputs(), gamma=0.5, grpo_norm_by_std=False, gigpo=weighed)
    assert found == pytest.approx([0.5 * one + 3 * other for one, other in zip(episodes, steps, strict=True)])
    deviation = stdev([0.5, 0.0, 2.0])
    scales = [deviation, ROOT, deviation, 1.0, ROOT, deviation, 1.0, 1.0]
    found = estimate("gigpo", inputs(), gamma=0.5, gigpo=GigpoConfig(episode_weight=0.0))
    assert found == pytest.approx([step / (scale + 1e-6) for step, scale in zip(steps, scales, strict=True)])


def test_attempts_at_one_proposed_problem_are_compared_with_each_other_alone() -> None:
    """Two proposals with two attempts each, of which those of the first are at another problem than those of the second."""
    attempts = [[1.0, 0.0], [1.0, 1.0]]
    given = inputs(attempts, [[7, 7], [8, 8]], [0, 0])
    settings = {"gamma": 0.0, "grpo_norm_by_std": False, "gigpo": GigpoConfig(episode_weight=0.0)}
    assert estimate("gigpo", given, **settings) == [0.5, -0.5, 0.0, 0.0]


def test_rae_against_a_mean_that_moves_from_batch_to_batch() -> None:
    kinds, carried = ["x/a", "x/b", "x/a", "y/a"], {"x/a": 0.5}
    half = {"rae": RaeConfig(decay=0.5)}
    found = estimate("rae", inputs(kinds=kinds, carried=carried), **half)
    assert found == [0.5, 0.5, 0.0, 0.0, 0.0, 1.5, 4.0, 4.0], "against the means before the batch, 0 at first"
    # two rewards of 1.5 in the mean move the first three quarters of the way
    assert carried == {"x/a": 1.25, "x/b": 0.0, "y/a": 2.0}
    assert estimate("rae", inputs(kinds=kinds, carried=carried), **half)[-1] == 2.0
    failed = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    mean = {"x/b": 7.0}
    found = estimate("rae", inputs(kinds=kinds, carried=mean, scored_B=failed), **half)
    assert (found[:5], mean["x/b"]) == ([0.0] * 5, 7.0), "a failed sample moves nothing"


# Properties.


@pytest.mark.parametrize("norm", [False, True])
def test_with_one_turn_per_sample_each_is_grpo(norm: bool) -> None:
    rewards = [0.25, 1.0, 0.0, 3.0, 1.0]
    given = inputs([[reward] for reward in rewards], [[0], [0], [0], [1], [1]], [0, 0, 0, 1, 1])
    expected = estimate("grpo", given, grpo_norm_by_std=norm)
    assert estimate("turn_grpo", given, grpo_norm_by_std=norm) == expected
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5)):
        own = GigpoConfig(step_weight=weights[0], episode_weight=weights[1])
        found = estimate("gigpo", given, grpo_norm_by_std=norm, gamma=0.9, gigpo=own)
        assert found == pytest.approx([sum(weights) * value for value in expected])


def test_grpo_of_turns_is_that_of_their_sums() -> None:
    """An estimator of samples does not see how their rewards are divided."""
    sums = inputs([[sum(own)] for own in TURNS], [[0]] * 4)
    by_sample = iter(estimate("grpo", sums))
    expected = [value for own in TURNS for value in [next(by_sample)] * len(own)]
    assert estimate("grpo", inputs()) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["turn_grpo", "gigpo", "rae"])
def test_neither_the_order_of_samples_nor_the_numbers_of_states_matter(name: str) -> None:
    order, settings = [3, 1, 0, 2], {"gamma": 0.7}
    kinds = ["x/a", "x/b", "x/a", "x/b"]
    found = iter(estimate(name, inputs(kinds=kinds), **settings))
    expected = [[next(found) for _ in own] for own in TURNS]
    states = [[{0: 9, 1: 0, 2: 4, 3: 1, 4: 6}[state] for state in STATES[at]] for at in order]
    mixed = inputs([TURNS[at] for at in order], states, [1 - GROUPS[at] for at in order], [kinds[at] for at in order])
    assert estimate(name, mixed, **settings) == pytest.approx([value for at in order for value in expected[at]])


@pytest.mark.parametrize("name", ["turn_grpo", "gigpo"])
def test_what_all_turns_of_a_state_share_does_not_matter(name: str) -> None:
    """One turn each: a constant is in every mean."""
    states, groups = [[0], [0], [1], [1]], [0, 0, 1, 1]
    one = estimate(name, inputs([[0.0], [1.0], [5.0], [2.0]], states, groups), gamma=0.9)
    other = estimate(name, inputs([[7.0], [8.0], [2.0], [-1.0]], states, groups), gamma=0.9)
    assert one == pytest.approx(other)
    assert fmean(one) == pytest.approx(0)


def test_states_are_needed() -> None:
    ones = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError, match="gigpo needs the states of turns"):
        estimate("gigpo", AdvantageInputs(ones, ones, [1, 1], torch.tensor([0, 0])))
