"""Advantages: by hand in float64, and what holds for every estimator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from hpcrl.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    is_per_token,
    is_per_turn,
    lambda_returns,
)
from hpcrl.algorithms.filters import varied
from hpcrl.algorithms.settings import configured
from hpcrl.algorithms.whitening import normalize, whiten
from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.algorithm import GDPOConfig
from hpcrl.config.sections.functions import GaeConfig, PassAtKConfig

GROUPS = [0, 0, 0, 1, 1, 2, 2, 2, 2]
REWARDS = [1.0, 0.0, 0.25, 3.0, 1.0, 0.5, 0.5, 2.0, 0.0]
TOKENS = [3, 1, 4, 2, 5, 1, 6, 2, 3]
NAMES = list(ESTIMATORS)
BY_SAMPLE = [name for name in NAMES if not is_per_token(ESTIMATORS[name]) and not is_per_turn(ESTIMATORS[name])]
BASELINES = {0: 0.5, 1: -1.0, 2: 0.125}  # of each group
BY_GROUP = ["grpo", "pass_at_k", "rloo", "opo", "reinforce++_baseline", "gdpo"]  # of a sample's reward
NAMED = {"reward": 1.0, "length": 0.5}  # the rewards of gdpo


def inputs(
    rewards: Sequence[float] = REWARDS,
    groups: Sequence[int] = GROUPS,
    tokens: Sequence[int] = TOKENS,
    holes: bool = True,
    seed: int = 0,
    baselines: Mapping[int, float] = BASELINES,
) -> AdvantageInputs:
    """Samples of a prompt of two tokens, a hole after the first token that the policy chose, the reward at the last.

    To estimators that compare turns each token is one, in one of two states of its group.
    """
    parts, masks = [], []
    for reward, count in zip(rewards, tokens, strict=True):
        mask = [0.0, 0.0] + [1.0] * count
        if holes and count > 1:
            mask.insert(3, 0.0)
        masks.append(torch.tensor(mask, dtype=torch.float64))
        parts.append(torch.zeros(len(mask), dtype=torch.float64))
        parts[-1][-1] = reward
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(part) for part in parts]
    anchors = [2 * group + at % 2 for group, length in zip(groups, lengths, strict=True) for at in range(length)]
    return AdvantageInputs(
        rewards_P=torch.cat(parts),
        mask_P=torch.cat(masks),
        lengths=lengths,
        groups_B=torch.tensor(groups),
        values_P=torch.randn(sum(lengths), generator=generator, dtype=torch.float64),
        baselines_B=torch.tensor([baselines[group] for group in groups], dtype=torch.float64),
        named_B=named(rewards, tokens),
        anchors_P=torch.tensor(anchors),
        earned_P=torch.cat(parts) + 0.01 * torch.cat(masks),
        kinds_B=[("even", "odd")[group % 2] for group in groups],
        norms_P=norms(tokens, lengths),
        longest=[
            max((n for n, own in zip(tokens, groups, strict=True) if own == group), default=0) for group in range(6)
        ],
    )


def norms(tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return norms of tokens that depend on their place and on the length of their sample, and no number where nothing is trained."""
    return torch.cat(
        [(torch.arange(n) * (count + 1.0)).sin().double() + 1 for count, n in zip(tokens, lengths, strict=True)]
    )


def named(rewards: Sequence[float], tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return two rewards of each sample."""
    return {"reward": torch.tensor(rewards, dtype=torch.float64), "length": torch.tensor(tokens, dtype=torch.float64)}


def estimate(name: str, given: AdvantageInputs, **settings: Any) -> list[torch.Tensor]:
    """Return the advantages of each sample's trained tokens."""
    algorithm = AlgorithmConfig(gdpo=GDPOConfig(rewards=NAMED), **settings)
    advantages_P = configured("advantage_estimator", name, ESTIMATORS, algorithm)(given)
    assert advantages_P.isfinite().all()
    assert advantages_P[given.mask_P == 0].abs().sum() == 0
    lengths = list(given.lengths)
    return [part[mask > 0] for part, mask in zip(advantages_P.split(lengths), given.mask_P.split(lengths), strict=True)]


def close(found: Sequence[torch.Tensor], expected: Sequence[Sequence[float] | torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.as_tensor(other, dtype=torch.float64), rtol=1e-12, atol=1e-12)


# By hand.

FORMULAS: dict[str, Callable[[float, list[float], list[int]], float]] = {
    "grpo": lambda r, group, _: (r - fmean(group)) / (stdev(group) + 1e-6),
    "rloo": lambda r, group, _: r - (sum(group) - r) / (len(group) - 1),
    "maxrl": lambda r, group, _: (r - fmean(group)) / (fmean(group) + 1e-6),
    "opo": lambda r, group, tokens: r - sum(n * x for n, x in zip(tokens, group, strict=True)) / sum(tokens),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_every_token_has_what_its_sample_has_over_its_group(name: str) -> None:
    expected = []
    for reward, group, count in zip(REWARDS, GROUPS, TOKENS, strict=True):
        others = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        tokens = [n for n, g in zip(TOKENS, GROUPS, strict=True) if g == group]
        expected.append([FORMULAS[name](reward, others, tokens)] * count)
    close(estimate(name, inputs()), expected)


def test_remax_against_the_greedy_response() -> None:
    expected = [[r - BASELINES[g]] * n for r, g, n in zip(REWARDS, GROUPS, TOKENS, strict=True)]
    close(estimate("remax", inputs()), expected)
    with pytest.raises(AssertionError, match="the rewards of greedy responses"):
        estimate("remax", replace(inputs(), baselines_B=None))


def test_grpo_without_the_standard_deviation() -> None:
    means = [1.25 / 3] * 3 + [2.0] * 2 + [0.75] * 4
    expected = [[r - mean] * n for r, mean, n in zip(REWARDS, means, TOKENS, strict=True)]
    close(estimate("grpo", inputs(), grpo_norm_by_std=False), expected)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("k", [2, 3, 4, 9])
def test_pass_at_k_is_what_a_sample_adds_to_the_best_of_the_others(k: int, norm: bool) -> None:
    expected = []
    for at, (reward, group, count) in enumerate(zip(REWARDS, GROUPS, TOKENS, strict=True)):
        others = [r for i, (r, g) in enumerate(zip(REWARDS, GROUPS, strict=True)) if g == group and i != at]
        choices = list(combinations(others, min(k, len(others) + 1) - 1))
        gain = fmean(max(reward, *chosen) - max(chosen) for chosen in choices)
        expected.append([gain / (stdev([reward, *others]) + 1e-6) if norm else gain] * count)
    close(estimate("pass_at_k", inputs(), grpo_norm_by_std=norm, pass_at_k=PassAtKConfig(k=k)), expected)


def test_pass_at_k_has_the_gradient_of_the_best_reward_of_k_samples() -> None:
    """A policy that solves with probability p: k times the mean over all groups of advantage x gradient is d/dp of 1 - (1 - p)^k."""
    p, n, k = 0.3, 5, 3
    gradient = 0.0
    for solved in range(n + 1):
        rewards = [1.0] * solved + [0.0] * (n - solved)
        given = inputs(rewards, [0] * n, [1] * n)
        advantages = [
            part.item() for part in estimate("pass_at_k", given, grpo_norm_by_std=False, pass_at_k=PassAtKConfig(k=k))
        ]
        scores = [1 / p if reward else -1 / (1 - p) for reward in rewards]
        chance = math.comb(n, solved) * p**solved * (1 - p) ** (n - solved)
        gradient += chance * k * fmean(a * s for a, s in zip(advantages, scores, strict=True))
    assert gradient == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-12)


def test_whitened_group_advantages() -> None:
    means = [1.25 / 3] * 3 + [2.0] * 2 + [0.75] * 4
    tokens = [r - mean for r, mean, n in zip(REWARDS, means, TOKENS, strict=True) for _ in range(n)]
    expected = [
        [(r - mean - fmean(tokens)) / math.sqrt(stdev(tokens) ** 2 + 1e-8)] * n
        for r, mean, n in zip(REWARDS, means, TOKENS, strict=True)
    ]
    close(estimate("reinforce++_baseline", inputs()), expected)


def test_gdpo_standardizes_each_reward_by_itself_and_whitens_the_sum_over_samples() -> None:
    summed = []
    for reward, group, count in zip(REWARDS, GROUPS, TOKENS, strict=True):
        members = [at for at, other in enumerate(GROUPS) if other == group]
        rewards, lengths = [REWARDS[at] for at in members], [float(TOKENS[at]) for at in members]
        parts = [(reward, rewards), (count, lengths)]
        standard = [(one - fmean(own)) / (stdev(own) + 1e-6) for one, own in parts]
        summed.append(standard[0] * NAMED["reward"] + standard[1] * NAMED["length"])
    scale = math.sqrt(stdev(summed) ** 2 + 1e-8)
    expected = [[(one - fmean(summed)) / scale] * n for one, n in zip(summed, TOKENS, strict=True)]
    close(estimate("gdpo", inputs()), expected)
    with pytest.raises(AssertionError, match="the rewards that"):
        estimate("gdpo", replace(inputs(), named_B=None))


def test_gdpo_tells_combinations_of_rewards_with_one_sum_apart() -> None:
    """The paper's point: grpo gives (1, 0) and (0, 1) the same, though one of the rewards is rare."""
    right, form = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    both = [one + other for one, other in zip(right, form, strict=True)]
    given = inputs(both, [0] * 6, [2] * 6)
    given = replace(given, named_B={"reward": torch.tensor(right).double(), "length": torch.tensor(form).double()})
    by_sum = [part[0].item() for part in estimate("grpo", given)]
    apart = [part[0].item() for part in estimate("gdpo", given)]
    assert by_sum[0] == by_sum[1]
    assert apart[0] > apart[1] > apart[5]


def test_gdpo_without_any_difference_is_0() -> None:
    given = inputs([0.1] * 9, tokens=[2] * 9)
    assert max(part.abs().max().item() for part in estimate("gdpo", given)) < 1e-6


def test_discounted_returns_by_hand() -> None:
    """Time passes with trained tokens only; a reward beside them belongs to the last one before."""
    given = AdvantageInputs(
        rewards_P=torch.tensor([9.0, 0, 1, 2, 0, 4, 8, 9, 1], dtype=torch.float64),
        mask_P=torch.tensor([0.0, 1, 1, 0, 1, 1, 0, 0, 1], dtype=torch.float64),
        lengths=[7, 2],
        groups_B=torch.tensor([0, 0]),
    )
    returns = lambda_returns(given, torch.zeros(9, dtype=torch.float64), 0.5, 1.0)
    # 12 at the last token, 6 before it, 3 + 3, and half of that; the 9s earned nothing that is trained
    assert returns.tolist() == [0, 3, 6, 0, 6, 12, 0, 0, 1]
    expected = [3.0, 6.0, 6.0, 12.0, 1.0]
    whitened = [(x - fmean(expected)) / math.sqrt(stdev(expected) ** 2 + 1e-8) for x in expected]
    close(estimate("reinforce++", given, gamma=0.5), [whitened[:4], whitened[4:]])


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 1.0)])
def test_gae_is_the_recursion_over_the_trained_tokens_of_each_sample(gamma: float, lambd: float) -> None:
    given = inputs()
    assert given.values_P is not None
    raw = []
    lengths = list(given.lengths)
    for rewards, values, mask in zip(
        *(x.split(lengths) for x in (given.rewards_P, given.values_P, given.mask_P)), strict=True
    ):
        r, v = rewards[mask > 0].tolist(), values[mask > 0].tolist()
        deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
        raw.append([sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, len(v))) for t in range(len(v))])
    tokens = [x for part in raw for x in part]
    scale = math.sqrt(stdev(tokens) ** 2 + 1e-8)
    expected = [[(x - fmean(tokens)) / scale for x in part] for part in raw]
    close(estimate("gae", given, gamma=gamma, lambd=lambd), expected)


def test_lambda_grows_with_the_length_of_a_sample() -> None:
    """Samples of 1, 5 and 40 tokens have the lambdas 0, 0.2 and 0.9 of alpha 0.25, each as if it were of all."""
    given = inputs([1.0, 0.5, -1.0], [0, 1, 2], [1, 5, 40], holes=False)
    assert given.values_P is not None
    lambdas = torch.tensor([0.0, 0.2, 0.9], dtype=torch.float64)
    each = [lambda_returns(given, given.values_P, 0.9, lambd.item()).split(list(given.lengths)) for lambd in lambdas]
    raw_P = torch.cat([each[at][at] for at in range(3)]) - given.values_P
    torch.testing.assert_close(lambda_returns(given, given.values_P, 0.9, lambdas) - given.values_P, raw_P)
    trained_P = raw_P[given.mask_P > 0]
    expected = (trained_P - trained_P.mean()) / (trained_P.var() + 1e-8).sqrt()
    found = estimate("gae", given, gamma=0.9, lambd=0.5, gae=GaeConfig(length_alpha=0.25))
    torch.testing.assert_close(torch.cat(found), expected)


def test_with_lambda_1_returns_are_the_discounted_rewards_whatever_the_critic_says() -> None:
    given = inputs()
    assert given.values_P is not None
    zeros = torch.zeros_like(given.values_P)
    torch.testing.assert_close(lambda_returns(given, given.values_P, 0.9, 1.0), lambda_returns(given, zeros, 0.9, 1.0))


def test_normalized_over_the_mask() -> None:
    given = inputs()
    values_P = torch.randn(len(given.mask_P), dtype=torch.float64) * 3 + 5
    normal = normalize(values_P, given.mask_P)
    chosen = normal[given.mask_P > 0]
    assert chosen.mean().item() == pytest.approx(0, abs=1e-12)
    assert chosen.square().mean().item() == pytest.approx(1)
    assert normal[given.mask_P == 0].abs().sum() == 0
    assert whiten(values_P, given.mask_P)[given.mask_P > 0].var().item() == pytest.approx(1, rel=1e-6)


# What holds for every estimator.


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_samples_and_the_numbers_of_groups_do_not_matter(name: str) -> None:
    order = torch.randperm(len(GROUPS), generator=torch.Generator().manual_seed(1)).tolist()
    given = inputs()
    names = {0: 5, 1: 0, 2: 3}
    mixed = inputs(
        [REWARDS[i] for i in order],
        [names[GROUPS[i]] for i in order],
        [TOKENS[i] for i in order],
        baselines={names[group]: baseline for group, baseline in BASELINES.items()},
    )
    assert given.values_P is not None
    values = given.values_P.split(list(given.lengths))
    mixed = replace(mixed, values_P=torch.cat([values[i] for i in order]))
    found = estimate(name, given, gamma=0.9, lambd=0.7)
    close(estimate(name, mixed, gamma=0.9, lambd=0.7), [found[i] for i in order])


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_one_entry_per_sample_says_the_same(name: str) -> None:
    whole = AdvantageInputs(
        rewards_P=torch.tensor(REWARDS, dtype=torch.float64),
        mask_P=torch.tensor(TOKENS, dtype=torch.float64),
        lengths=[1] * len(GROUPS),
        groups_B=torch.tensor(GROUPS),
        baselines_B=inputs().baselines_B,
        named_B=inputs().named_B,
        earned_P=torch.tensor(REWARDS, dtype=torch.float64) + 0.01 * torch.tensor(TOKENS, dtype=torch.float64),
        kinds_B=inputs().kinds_B,
    )
    algorithm = AlgorithmConfig(gdpo=GDPOConfig(rewards=NAMED))
    values = configured("advantage_estimator", name, ESTIMATORS, algorithm)(whole)
    close(estimate(name, inputs()), [[value] * n for value, n in zip(values.tolist(), TOKENS, strict=True)])


@pytest.mark.parametrize("name", BY_GROUP)
def test_what_all_rewards_of_a_group_share_does_not_matter(name: str) -> None:
    shifted = [r + (7, -3, 100)[g] for r, g in zip(REWARDS, GROUPS, strict=True)]
    for one, other in zip(estimate(name, inputs(shifted)), estimate(name, inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "power"),
    [
        ("grpo", 0),
        ("pass_at_k", 0),
        ("gdpo", 0),
        ("rloo", 1),
        ("opo", 1),
        ("maxrl", 0),
        ("reinforce++", 0),
        ("reinforce++_baseline", 0),
    ],
)
def test_the_scale_of_rewards(name: str, power: int) -> None:
    scaled = estimate(name, inputs([r * 8 for r in REWARDS]))
    for one, other in zip(scaled, estimate(name, inputs()), strict=True):
        torch.testing.assert_close(one, other * 8**power, rtol=1e-4, atol=1e-6)  # but for the epsilons


@pytest.mark.parametrize("name", [*BY_GROUP[:-1], "maxrl", "reinforce++"])
def test_equal_rewards_teach_nothing(name: str) -> None:
    for part in estimate(name, inputs([0.1] * 9)):
        assert part.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.7, -0.3]),
        ("maxrl", [0.7, -0.3]),
        ("pass_at_k", [0.0, 0.0]),
        ("rloo", [0.0, 0.0]),
        ("opo", [0.0, 0.0]),
        ("remax", [0.2, 0.7]),
    ],
)
def test_a_sample_alone(name: str, expected: list[float]) -> None:
    found = estimate(name, inputs([0.7, -0.3], [0, 1], [2, 3]))
    for part, value in zip(found, expected, strict=True):
        torch.testing.assert_close(part, torch.full_like(part, value), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_that_failed_counts_in_no_statistic_of_its_group(name: str) -> None:
    """The others have what they have in a group without it: no n counts it, and what stands for its reward means nothing."""
    failed = [0.4, -9.0, 0.75]  # the mean of its group, a number of no meaning, a whole group of its own
    given = inputs([*REWARDS, *failed], [*GROUPS, 0, 1, 3], [*TOKENS, 0, 0, 0], baselines={**BASELINES, 3: 0.0})
    scored_B = torch.tensor([1.0] * len(REWARDS) + [0.0] * len(failed), dtype=torch.float64)
    assert given.values_P is not None
    values_P = torch.cat([inputs().values_P, given.values_P[-2 * len(failed) :]])  # pyright: ignore[reportCallIssue, reportArgumentType]
    found = estimate(name, replace(given, scored_B=scored_B, values_P=values_P))
    close(found[: len(REWARDS)], estimate(name, inputs()))
    assert [len(part) for part in found[len(REWARDS) :]] == [0, 0, 0]


@pytest.mark.parametrize("name", ["grpo", "pass_at_k", "rloo", "maxrl", "opo", "reinforce++_baseline"])
def test_the_only_sample_of_a_group_that_did_not_fail_has_nothing_to_be_compared_with(name: str) -> None:
    given = inputs([0.7, 0.7, 0.7], [0, 0, 0], [0, 2, 0])
    (_, left, _) = estimate(name, replace(given, scored_B=torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)))
    assert left.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [[0, 0, 0], [0, 1, 0], [0, 3, 1]])
def test_samples_without_a_trained_token_are_harmless(name: str, tokens: list[int]) -> None:
    found = estimate(name, inputs([1.0, 0.0, 0.5], [0, 0, 1], tokens))
    assert [len(part) for part in found] == tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_without_samples(name: str) -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    nobody = torch.zeros(0, dtype=torch.int64)
    none = AdvantageInputs(
        empty,
        empty,
        [],
        nobody,
        empty,
        empty,
        named([], []),
        anchors_P=nobody,
        earned_P=empty,
        norms_P=empty,
        longest=[],
    )
    assert estimate(name, none) == []


@pytest.mark.parametrize("name", NAMES)
def test_large_rewards_stay_finite(name: str) -> None:
    estimate(name, inputs([r * 1e12 for r in REWARDS]))
    estimate(name, inputs([r * 1e-30 for r in REWARDS]))


def test_shapes_are_checked() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="for 4 entries"):
        AdvantageInputs(ones, ones, [2, 2], torch.tensor([0, 0]))
    with pytest.raises(AssertionError, match="1 groups for 2 samples"):
        AdvantageInputs(ones, ones, [2, 1], torch.tensor([0]))
    with pytest.raises(AssertionError, match="1 scored for 2 samples"):
        AdvantageInputs(ones, ones, [2, 1], torch.tensor([0, 0]), scored_B=ones[:1])
    with pytest.raises(AssertionError, match="1 baselines for 2 samples"):
        AdvantageInputs(ones, ones, [2, 1], torch.tensor([0, 0]), baselines_B=ones[:1])
    with pytest.raises(AssertionError, match="3 of form for 2 samples"):
        AdvantageInputs(ones, ones, [2, 1], torch.tensor([0, 0]), named_B={"form": ones})


@pytest.mark.parametrize(
    ("rewards", "worth"), [([0.1] * 7, False), ([0.0, 1.0], True), ([1.0], True), ([-1.0, -1.0], False)]
)
def test_groups_that_teach_something(rewards: list[float], worth: bool) -> None:
    assert varied(rewards) is worth
