"""What the controller says of a batch: it counts samples, not rows, and means are over those that have a value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcrl.algorithms.filters import filter_values, is_worth_training, share_without_spread
from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.algorithm import DynamicSamplingConfig
from hpcrl.config.sections.environment import REWARD_MODEL
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.metrics import batch_histograms, batch_metrics
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.observe.scores import scores
from hpcrl.trainer.batching import trained_groups
from hpcrl.types import Batch, GroupMeta, TurnMeta
from tests.rows import group_meta


def group(rewards: list[float], failed: str = "", **others: Any) -> GroupMeta:
    """A group whose samples marked by x in `failed` have failed."""
    marks = failed or "." * len(rewards)
    values: dict[str, Any] = {
        "env_metrics": [{"right": float(reward > 0)} for reward in rewards],
        "stop_reasons": ["failed" if mark == "x" else "stop" for mark in marks],
        "failures": ["it raised"] * marks.count("x"),
    }
    return group_meta(
        group_id="g00000001", kind="train", replica=0, path="", rewards=rewards, lengths=[10] * len(rewards),
        response_lengths=[4] * len(rewards), oldest_version=0, newest_version=0, data_source="letters", seconds=1.0,
        **(values | others),
    )  # fmt: skip


def metrics(*groups: GroupMeta) -> dict[str, float]:
    return batch_metrics(Batch(1, list(groups), len(groups)), 1.0)


def test_groups_whose_samples_all_failed_are_not_0() -> None:
    lost = [group([0.0, 0.0], "xx")] * 3
    found = metrics(*[group([1.0, 1.0])] * 3, *[group([0.0, 0.0])] * 2, *lost)
    for name in ("reward/avg_raw_reward", "reward/mean_positive_reward", "reward/avg_pass_at_2", "environment/right"):
        assert found[name] == pytest.approx(0.6)
    assert found["generate/stop_ratio"] == 1.0
    assert (found["generate/samples"], found["generate/failed_samples"]) == (16, 6)


def test_a_sample_that_failed_counts_in_no_mean() -> None:
    found = metrics(group([1.0, 0.5, 0.0], ".x."), group([0.0, 0.0, 0.0], "x.."))
    assert found["reward/avg_raw_reward"] == 0.25
    assert found["reward/avg_pass_at_3"] == 0.5
    assert found["environment/right"] == 0.25
    histogram = batch_histograms(Batch(1, [group([1.0, 0.5, 0.0], ".x.")], 1))["reward"]
    assert histogram is not None
    assert sum(histogram.counts) == 2


def test_what_no_sample_has_is_left_out() -> None:
    found = metrics(group([0.0, 0.0], "xx"))
    assert not [name for name in found if name.startswith(("reward/", "environment/"))]
    assert "generate/stop_ratio" not in found
    assert "generate/avg_tokens_zero_rewards" not in found
    assert found["generate/avg_num_tokens"] == 4
    assert batch_histograms(Batch(1, [group([0.0, 0.0], "xx")], 1))["reward"] is None


def test_a_sample_that_the_reward_model_cannot_score_counts_in_no_mean() -> None:
    judged = JudgedRewards(1.0, -10.0, 10.0).complete(group([0.0, 0.0, 0.0]), [3.0, None, 1.0])
    assert judged.rewards == [3.0, 2.0, 1.0]
    assert [sample.reward for sample in judged.scored_samples] == [3.0, 1.0]
    assert metrics(judged)["reward/avg_raw_reward"] == 2.0
    assert filter_values(judged, [REWARD_MODEL]) == [3.0, 1.0]


def test_a_failed_sample_makes_no_group_worth_training() -> None:
    right = [{"right": 0.1}, {}, {"right": 0.1}, {"right": 0.1}]
    assert not is_worth_training(group([0.0] * 4, ".x..", env_metrics=right), ["right"])
    assert is_worth_training(group([0.0] * 4, ".x..", env_metrics=[*right[:3], {"right": 0.2}]), ["right"])
    judged = JudgedRewards(1.0, -10.0, 10.0).complete(group([0.0] * 4), [0.1, None, 0.1, 0.1])
    assert not is_worth_training(judged, [])


@pytest.mark.parametrize(
    ("rewards", "failed", "worth"),
    [([0.5], "x", False), ([0.0, 0.0], "xx", False), ([1.0, 1.0], ".x", False), ([1.0, 0.5, 0.0], ".x.", True)],
)
def test_a_group_needs_two_samples_that_have_a_reward_or_is_one(rewards: list[float], failed: str, worth: bool) -> None:
    assert is_worth_training(group(rewards, failed), []) is worth


@pytest.mark.parametrize(("estimator", "trained"), [("grpo", []), ("gigpo", [0]), ("turn_grpo", [0])])
def test_estimators_of_turns_learn_from_turns_of_different_rewards(estimator: str, trained: list[int]) -> None:
    """Two samples with a sum of 1, one by its first turn and one by its second; and two of one turn and reward each."""
    samples = [
        replace(sample, turns=[[TurnMeta(3, first, "", 0), TurnMeta(6, 1.0 - first, "", 1)]])
        for sample, first in zip(group([1.0, 1.0]).samples, (1.0, 0.0), strict=True)
    ]
    batch = Batch(1, [replace(group([1.0, 1.0]), samples=samples), group([1.0, 1.0])], 1)
    algorithm = AlgorithmConfig(advantage_estimator=estimator, zero_variance_filter=True)
    assert trained_groups(batch, algorithm) == trained
    named = replace(algorithm, filter_reward_metric=["right"])
    batch.groups[0] = replace(batch.groups[0], samples=[replace(one, env_metrics={"right": 1.0}) for one in samples])
    assert trained_groups(replace(batch, groups=batch.groups[:1]), named) == []


def of_rows(rewards: list[float], rows: list[int]) -> GroupMeta:
    """A group as a worker reports it: ten tokens a row."""
    return group_meta(
        group_id="g00000001", kind="train", replica=0, path="", rewards=rewards, lengths=[10] * sum(rows),
        response_lengths=[4 * count for count in rows], stop_reasons=["stop"] * len(rewards), oldest_version=0,
        newest_version=0, data_source="letters", seconds=1.0, env_metrics=[{"tries": float(count)} for count in rows],
        rows=rows,
    )  # fmt: skip


GROUPS = [of_rows([1.0, 0.0], [3, 1]), of_rows([0.0, 0.0], [1, 5])]


def test_metrics_are_means_over_samples() -> None:
    found = batch_metrics(Batch(1, GROUPS, 2), 1.0)
    assert found["reward/avg_raw_reward"] == 0.25
    assert found["reward/avg_pass_at_2"] == 0.5
    assert found["environment/tries"] == 2.5
    assert (found["generate/samples"], found["generate/rows"]) == (4, 10)
    assert (found["generate/avg_num_tokens"], found["generate/max_num_tokens"]) == (10, 20)
    assert found["generate/avg_tokens_non_zero_rewards"] == 12


def test_share_of_groups_whose_samples_have_the_same_reward() -> None:
    """Failed samples do not differ from others; groups of one sample have nothing to differ from."""
    different, alike, failed = group([1.0, 0.5]), group([0.5, 0.5]), group([1.0, 0.0], ".x")
    assert metrics(different, alike, failed, different)["reward/groups_without_spread"] == 0.5
    assert share_without_spread([different], dropped=3) == 0.75
    assert share_without_spread([]) == 1.0
    assert "reward/groups_without_spread" not in metrics(group([1.0]), group([1.0]))


def test_scores_are_means_over_samples() -> None:
    found = scores(GROUPS, 1.0)
    assert (found["eval/all/avg_score"], found["eval/all/pass_at_2"], found["eval/all/pass_at_1"]) == (0.25, 0.5, 0.25)


def test_dynamic_sampling_judges_samples() -> None:
    sampling = DynamicSampling(DynamicSamplingConfig(type="filter"))
    assert [sampling.keeps(meta) for meta in GROUPS] == [True, False]


def test_a_batch_file_says_which_rows_belong_to_which_sample() -> None:
    batch = Batch.from_json(Batch(1, GROUPS, 2).to_json())
    assert [meta.owners for meta in batch.groups] == [[0, 0, 0, 1], [0, 1, 1, 1, 1, 1]]
    without = {name: value for name, value in group([1.0, 0.0], "").to_json().items() if name != "rows"}
    assert GroupMeta.from_json(without).owners == [0, 1], "files of before have a row for each sample"


@pytest.mark.parametrize(("tolerance", "worth"), [(0.0, True), (1e-6, False), (1e-8, True)])
def test_rewards_that_hardly_differ_are_equal_within_a_tolerance(tolerance: float, worth: bool) -> None:
    assert is_worth_training(group([0.5, 0.5 + 1e-7, 0.5]), [], tolerance) is worth
