"""Rewards of whole groups: properties that hold for any rewards and answers, and values worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.grouped import GROUP_REWARDS, WeightedGroupRewards
from hpcrl.envs.rewards.response import GroupSample
from hpcrl.errors import ConfigError, UserCodeError

ENVIRONMENT = EnvironmentConfig()
HERE = __name__


def group(*samples: tuple[str, float]) -> list[GroupSample]:
    return [GroupSample(text=text, reward=reward, n_tokens=len(text.split())) for text, reward in samples]


def values(name: str, *samples: tuple[str, float]) -> list[float]:
    return list(GROUP_REWARDS[name](group(*samples), ENVIRONMENT))


def of(*rewards: float) -> list[tuple[str, float]]:
    return [(str(at), reward) for at, reward in enumerate(rewards)]


RNG = random.Random(7)
GROUPS = [[RNG.choice([-1.0, 0.0, 0.5, 2.0]) for _ in range(size)] for size in (1, 2, 3, 5, 8, 8, 16)]


@pytest.mark.parametrize("rewards", GROUPS)
def test_ranks_sum_to_zero_and_depend_on_the_order_alone(rewards: list[float]) -> None:
    ranks = values("rank", *of(*rewards))
    assert sum(ranks) == pytest.approx(0.0)
    assert all(-1 <= one <= 1 for one in ranks)
    assert values("rank", *of(*(100 * reward**3 + 7 for reward in rewards))) == ranks
    pairs = [(rewards[i] - rewards[j], ranks[i] - ranks[j]) for i in range(len(ranks)) for j in range(len(ranks))]
    assert all((one > 0, one < 0) == (other > 0, other < 0) for one, other in pairs)


def test_values_worked_out_by_hand() -> None:
    assert values("rank", *of(0.0, 3.0, 0.0, 9.0)) == pytest.approx([-2 / 3, 1 / 3, -2 / 3, 1.0])
    assert values("best", *of(0.0, 3.0, 3.0, -9.0)) == [0.0, 1.0, 1.0, 0.0]
    assert values("own", *of(0.25, -1.0)) == [0.25, -1.0]


def test_copies_share_a_positive_reward() -> None:
    same = [("<think>a</think> It is  4\n", 1.0), ("It is 4", 1.0), ("It is 5", 0.5), ("no", -1.0), ("no", -1.0)]
    assert values("unique", *same) == [0.5, 0.5, 0.5, -1.0, -1.0]
    assert values("unique", *of(*GROUPS[-1])) == GROUPS[-1], "different answers keep theirs"


def test_sequences_that_others_have_as_well_are_worth_nothing() -> None:
    assert values("distinct", ("a b c d", 0), ("x b c d", 0)) == [0.5, 0.5]
    assert values("distinct", ("a b c", 0), ("a b c", 0), ("", 0), ("c", 0)) == [0.0, 0.0, 0.0, 1.0]
    assert values("distinct", ("a a a a a", 0)) == [1.0], "a sequence counts once"


def test_short_answers_earn_more_where_they_are_right_and_nothing_where_they_are_wrong() -> None:
    assert values("short", ("a", 1), ("a b c", 1), ("a b c d e", 1), ("a", 0), ("a b c d e", -1)) == [
        0.5,
        0,
        -0.5,
        0,
        -0.5,
    ]
    assert values("short", ("a b", 1), ("c d", 0)) == [0, 0], "equally long"


@pytest.mark.parametrize("name", [name for name in GROUP_REWARDS if not name.endswith("_judge")])
def test_the_order_of_the_samples_changes_nothing(name: str) -> None:
    words = ["a", "b", "c", "d"]
    samples = [
        (" ".join(RNG.choice(words) for _ in range(RNG.randrange(6))), RNG.choice([-1.0, 0.0, 1.0])) for _ in range(9)
    ]
    found = values(name, *samples)
    order = RNG.sample(range(9), 9)
    assert values(name, *(samples[at] for at in order)) == [found[at] for at in order]


FOUND: list[Any] = []


def given(samples: Sequence[GroupSample], environment: EnvironmentConfig) -> Any:  # noqa: ARG001
    return FOUND.pop()


def test_the_sum_is_weighted_and_each_value_is_reported() -> None:
    rewards = WeightedGroupRewards({"own": 0.5, "rank": 2.0, "best": 0.0, f"{HERE}:given": -1.0}, ENVIRONMENT)
    FOUND.append(iter([3, True]))
    first, second = rewards(group(("a", 1.0), ("b", 4.0)))
    assert first == {"own": 1.0, "rank": -1.0, "best": 0.0, f"{HERE}:given": 3.0}
    assert (rewards.own_weight, rewards.added(first), rewards.added(second)) == (0.5, -5.0, 1.0)
    assert WeightedGroupRewards({"rank": 1.0}, ENVIRONMENT).own_weight == 0.0


@pytest.mark.parametrize("found", [[1.0], [1.0, 2.0, 3.0], 1.0, None, [1.0, float("nan")], [1.0, "2"], "12"])
def test_anything_but_a_number_for_each_sample_is_an_error(found: Any) -> None:
    FOUND.append(found)
    with pytest.raises(UserCodeError, match=rf"^group reward '{HERE}:given': "):
        WeightedGroupRewards({f"{HERE}:given": 1.0}, ENVIRONMENT)(group(("a", 0.0), ("b", 0.0)))


def test_a_sum_that_is_too_large_is_an_error() -> None:
    FOUND.append([1e20])
    with pytest.raises(UserCodeError, match=r"^weighted sum of group rewards: 1e\+40; expected a finite number"):
        WeightedGroupRewards({f"{HERE}:given": 1e20}, ENVIRONMENT)(group(("a", 0.0)))


def test_a_name_that_nothing_has_is_an_error_of_its_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"^environment.group_reward_function: nothing is called 'ranks'; did you mean"
    ):
        WeightedGroupRewards({"ranks": 1.0}, ENVIRONMENT)
