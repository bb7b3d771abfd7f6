"""Samples with a row for each turn: the controller counts samples."""

from __future__ import annotations

from hpcrl.config.sections.algorithm import DynamicSamplingConfig
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.metrics import batch_metrics
from hpcrl.observe.scores import scores
from hpcrl.types import Batch, GroupMeta


def group(rewards: list[float], rows: list[int]) -> GroupMeta:
    """A group as a worker reports it: ten tokens a row."""
    return GroupMeta(
        group_id="g00000001", kind="train", replica=0, path="", rewards=rewards, lengths=[10] * sum(rows),
        response_lengths=[4 * count for count in rows], stop_reasons=["stop"] * len(rewards), oldest_version=0,
        newest_version=0, data_source="letters", seconds=1.0, env_metrics=[{"tries": float(count)} for count in rows],
        rows=rows,
    )  # fmt: skip


GROUPS = [group([1.0, 0.0], [3, 1]), group([0.0, 0.0], [1, 5])]


def test_metrics_are_means_over_samples() -> None:
    found = batch_metrics(Batch(1, GROUPS, 2))
    assert found["reward/avg_raw_reward"] == 0.25
    assert found["reward/avg_pass_at_2"] == 0.5
    assert found["environment/tries"] == 2.5
    assert (found["generate/samples"], found["generate/rows"]) == (4, 10)
    assert (found["generate/avg_num_tokens"], found["generate/max_num_tokens"]) == (10, 20)
    assert found["generate/avg_tokens_non_zero_rewards"] == 12


def test_scores_are_means_over_samples() -> None:
    found = scores(GROUPS)
    assert (found["eval/all/avg_score"], found["eval/all/pass_at_2"], found["eval/all/pass_at_1"]) == (0.25, 0.5, 0.25)


def test_dynamic_sampling_judges_samples() -> None:
    sampling = DynamicSampling(DynamicSamplingConfig(type="filter"))
    assert [sampling.keeps(meta) for meta in GROUPS] == [True, False]


def test_a_batch_file_says_which_rows_belong_to_which_sample() -> None:
    batch = Batch.from_json(Batch(1, GROUPS, 2).to_json())
    assert [meta.owners for meta in batch.groups] == [[0, 0, 0, 1], [0, 1, 1, 1, 1, 1]]
    without = {name: value for name, value in GROUPS[0].to_json().items() if name != "rows"}
    assert GroupMeta.from_json(without).owners == [0, 1], "files of before have a row for each sample"
