"""What an evaluation comes to by data source, with fewer samples per prompt than there were, how far it may be off, and two of them compared."""

from __future__ import annotations

from itertools import combinations, product
from math import isnan
from statistics import fmean

import pytest

from hpcrl.observe.scores import (
    MOST_SOURCES,
    by_source,
    compare,
    is_solved,
    pass_at,
    results_of,
    scores,
    standard_errors,
)
from hpcrl.types import GroupMeta
from tests.rows import group_meta


def group(source: str, rewards: list[float], lengths: list[int] | None = None, failed: int = 0) -> GroupMeta:
    """A group whose last samples have failed."""
    lengths = lengths or [4] * len(rewards)
    return group_meta(
        group_id="e", kind="eval", replica=0, path="", rewards=rewards, lengths=lengths, response_lengths=lengths,
        stop_reasons=["stop"] * (len(rewards) - failed) + ["failed"] * failed, oldest_version=0, newest_version=0, data_source=source, seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_that_include_a_solved_sample(n: int) -> None:
    """All subsets of k samples, counted."""
    for solved in range(n + 1):
        samples = [True] * solved + [False] * (n - solved)
        for k in range(1, n + 1):
            draws = list(combinations(samples, k))
            share = sum(map(any, draws)) / len(draws)
            assert pass_at(k, samples) == pytest.approx(share, abs=1e-12)


def test_a_sample_is_solved_from_a_reward_on_or_by_its_metric_success() -> None:
    """A fifth for the form of an answer solves nothing, and 0.7 + 0.2 + 0.1 is 1, which floating point misses."""
    shaped = [group("a", [0.2, 0.2]), group("a", [0.2, 0.7 + 0.2 + 0.1])]
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert scores(shaped, 1.0)["eval/all/pass_at_2"] == 0.5
    assert scores(shaped, 1.0)["eval/all/pass_at_1"] == 0.25
    assert scores(shaped, 0.2)["eval/all/pass_at_1"] == 1.0
    assert results_of(shaped, 0.2)["solved"] == "reward ≥ 0.2"
    for reward, success, solved in ((0.0, 1.0, True), (5.0, 0.9, False)):
        assert is_solved(reward, {"success": success}, 1.0) is solved
    assert [is_solved(reward, {}, -0.5) for reward in (-0.5, -0.4, -0.6)] == [True, True, False]


def test_pass_at_k_of_many_samples() -> None:
    """As the estimator's paper computes it: a product in floating point."""
    product = 1.0
    for at in range(1000 - 17 + 1, 1001):
        product *= 1 - 64 / at
    assert pass_at(64, [True] * 17 + [False] * 983) == pytest.approx(1 - product, rel=1e-12)


def test_what_a_dataset_calls_its_sources_is_fit_for_a_name_and_limited_in_number() -> None:
    found = scores([group("a\x1b]0;x\x07\u202e\n/b" + "c" * 200, [1.0]), group("Übung 1", [0.0])], 1.0)
    sources = {name.split("/")[1] for name in found}
    assert sources == {"all", "a_]0;x____b".replace("]", "_") + "c" * 69, "Übung 1"}
    many = [group(f"s{number:03}", [1.0]) for number in range(100)] + [group("s099", [0.0])]
    sources = {name.split("/")[1] for name in scores(many, 1.0)}
    assert len(sources) == MOST_SOURCES + 2
    assert {"all", "other", "s000", "s099"} <= sources, "the most frequent have names"
    assert {name: len(members) for name, members in by_source(many).items() if name in ("all", "other")} == {
        "all": 101, "other": 36,
    }  # fmt: skip


def test_each_data_source_has_its_own_scores() -> None:
    found = scores(
        [
            group("openai/gsm8k", [1.0, 0.0, 0.0, 0.0, 0.0], [1, 2, 3, 4, 5]),
            group("openai/gsm8k", [0.0] * 5),
            group("all", [1.0] * 5, [10] * 5),
        ],
        1.0,
    )
    gsm8k = {name.removeprefix("eval/openai_gsm8k/"): value for name, value in found.items() if "gsm8k" in name}
    assert gsm8k == {
        "avg_score": 0.1,
        "mean_positive_reward": 0.1,
        "pass_at_1": pytest.approx(0.1),
        "pass_at_2": pytest.approx(0.2),
        "pass_at_4": pytest.approx(0.4),
        "pass_at_5": 0.5,
        "generate/avg_num_tokens": 3.5,
        "generate/failed_samples": 0.0,
    }
    assert found["eval/all_/avg_score"] == 1.0, "a source called all is not all sources"
    assert found["eval/all/avg_score"] == pytest.approx(0.4)
    assert found["eval/all/pass_at_5"] == pytest.approx(2 / 3)
    assert found["eval/all/generate/avg_num_tokens"] == pytest.approx((15 + 20 + 50) / 15)


def test_samples_that_failed_have_no_score() -> None:
    """Eight prompts, of which three failed whole, and one in one of its two samples."""
    whole = [group("a", [1.0, 1.0])] * 2 + [group("a", [0.0, 0.0])] * 2
    prompts = [*whole, group("a", [1.0, 0.0], failed=1), *[group("b", [0.0, 0.0], failed=2)] * 3]
    found = scores(prompts, 1.0)
    assert found["eval/all/avg_score"] == 0.6
    assert found["eval/all/mean_positive_reward"] == pytest.approx(5 / 9)
    assert found["eval/all/pass_at_1"] == 0.6
    assert found["eval/all/pass_at_2"] == 0.5, "of the prompts with two samples"
    assert found["eval/all/generate/failed_samples"] == 7
    assert {name for name in found if name.startswith("eval/b/")} == {
        "eval/b/generate/avg_num_tokens",
        "eval/b/generate/failed_samples",
    }
    errors = standard_errors(prompts, 1.0)
    assert errors["eval/all/avg_score"] == pytest.approx((0.3 / 5) ** 0.5)
    assert not any(name.startswith("eval/b/") for name in errors)


def test_one_sample_per_prompt_has_one_pass_at_k() -> None:
    assert {name for name in scores([group("a", [1.0])], 1.0) if "pass" in name} == {
        "eval/a/pass_at_1",
        "eval/all/pass_at_1",
    }


def test_the_standard_error_is_that_of_the_means_of_prompts() -> None:
    """Worked out by hand: means 1, 0 and 1/2 of three prompts; deviation 1/2, divided by the root of 3."""
    errors = standard_errors([group("a", [1.0, 1.0]), group("a", [0.0, 0.0]), group("b", [1.0, 0.0])], 1.0)
    assert errors["eval/all/avg_score"] == pytest.approx(0.5 / 3**0.5)
    assert errors["eval/all/pass_at_2"] == pytest.approx((1 / 3) ** 0.5 / 3**0.5)
    assert errors["eval/a/avg_score"] == pytest.approx(0.5**0.5 / 2**0.5)
    assert not any(name.startswith("eval/b/") for name in errors), "one prompt says nothing of others"


def test_results_count_how_samples_ended() -> None:
    found = results_of([group("a", [1.0, 0.0]), group("b", [1.0, 0.0])], 1.0)
    assert found["prompts"] == {"all": 2, "a": 1, "b": 1}
    assert found["stop_reasons"]["all"] == {"stop": 4}


@pytest.mark.parametrize("differences", [[1.0] * 8, [0.5, 0.5, -0.5, 1.0, 0.0, 0.25, 1.0, -1.0, 0.5], [-0.3, 0.1, 0.2]])
def test_p_values_are_those_of_all_signs(differences: list[float]) -> None:
    """The share of all 2^n sign patterns whose sum is as large, which the test estimates from draws."""
    observed = abs(sum(differences)) - 1e-9
    signs = list(product((1, -1), repeat=len(differences)))
    exact = fmean(abs(sum(s * d for s, d in zip(pattern, differences, strict=True))) >= observed for pattern in signs)
    found = compare([0.0] * len(differences), differences)
    assert found.p == pytest.approx(exact, abs=0.015)
    assert found == compare([0.0] * len(differences), differences), "the draws are the same ones each time"


def test_a_difference_that_all_prompts_share() -> None:
    found = compare([0.0] * 40, [1.0] * 40)
    assert (found.mean, found.error, found.p) == (1.0, 0.0, 1e-4)
    assert (found.better, found.same, found.worse) == (40, 0, 0)
    nothing = compare([0.5] * 40, [0.5] * 40)
    assert (nothing.mean, nothing.p, nothing.same) == (0.0, 1.0, 40)
    assert isnan(compare([0.0], [1.0]).error)


def test_pairs_count_not_the_spread_of_prompts() -> None:
    """A small gain on each of many prompts that differ widely is seen."""
    before = [prompt / 100 for prompt in range(100)]
    after = [value + (0.02 if prompt % 4 else -0.01) for prompt, value in enumerate(before)]
    found = compare(before, after)
    low, high = found.interval
    assert found.mean == pytest.approx(0.0125)
    assert 0.009 < low < 0.0125 < high < 0.016
    assert found.p == 1e-4
    assert (found.better, found.worse) == (75, 25)
