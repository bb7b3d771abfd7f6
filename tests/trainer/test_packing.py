from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.batching import MicroBatchLimit, RowRef, assign_to_ranks, mini_batches, planned
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import MiniBatch, Scores, pack, set_loss_weights
from hpcrl.trainer.read_batch import load_rows, observations
from hpcrl.types import Batch, Row, SamplingMask
from tests.rows import with_columns, write_group
from tests.trainer.material import load, make_batch, make_run, make_sample, views


def sample(ids: list[int], mask: list[float]) -> Row:
    length = len(ids)
    logprobs = -torch.tensor(ids, dtype=torch.float32) / 10 * torch.tensor(mask)
    zeros = torch.zeros(length)
    return Row(torch.tensor(ids), torch.tensor(mask), logprobs, zeros.int(), zeros, "stop")


def test_labels_are_shifted_once_and_stay_in_their_sample() -> None:
    samples = pack([sample([11, 12, 13], [0, 1, 1]), sample([14, 15], [1, 1])])
    samples.scores.advantages = torch.tensor([2.0, 3.0, 0.0, -2.0, 0.0])
    batch = samples.whole()
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.lengths == [3, 2]
    assert batch.labels.tolist() == [12, 13, 0, 15, 0]
    assert batch.loss_mask.tolist() == [1, 1, 0, 1, 0]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([-1.2, -1.3, 0, -1.5, 0]))
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [2, 3, 0, -2, 0]
    assert batch.old_logprobs is None
    assert sum(samples.trained) == batch.loss_mask.sum() == 3


def test_a_micro_batch_is_a_slice() -> None:
    samples = pack([sample([1, 2], [0, 1]), sample([3], [1]), sample([4, 5, 6], [0, 1, 1])])
    samples.scores = Scores(old_logprobs=torch.arange(6.0), ref_logprobs=5 + torch.arange(6.0))
    batch = samples.micro_batch(range(1, 3))
    assert batch.advantages is None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    assert (batch.lengths, batch.token_ids.tolist()) == ([1, 3], [3, 4, 5, 6])
    assert batch.positions.tolist() == [0, 0, 1, 2]
    assert batch.labels.tolist() == [0, 5, 6, 0]
    assert batch.old_logprobs.tolist() == [2, 3, 4, 5]
    assert batch.ref_logprobs.tolist() == [7, 8, 9, 10]
    for name in ("token_ids", "labels", "loss_mask", "rollout_logprobs"):
        assert getattr(batch, name).data_ptr() > getattr(samples, name).data_ptr(), "packed once, and not copied"
        assert getattr(batch, name).untyped_storage().data_ptr() == getattr(samples, name).untyped_storage().data_ptr()


def test_sampling_masks_are_shifted_and_padded() -> None:
    masked = replace(
        sample([11, 12, 13, 14], [0, 1, 1, 1]),
        sampling_mask=SamplingMask(torch.tensor([12, 9, 14]).int(), torch.tensor([0, 2, 0, 1]).int()),
    )
    other = replace(masked, sampling_mask=SamplingMask(torch.tensor([13]).int(), torch.tensor([0, 0, 1, 0]).int()))
    samples = pack([masked, sample([14, 15], [0, 1]), other])
    none = [-1, -1]
    assert samples.whole().sampling_mask is not None
    assert samples.whole().sampling_mask.tolist() == [
        *([12, 9], none, [14, -1], none),
        *(none, none),
        *(none, [13, -1], none, none),
    ]
    last = samples.micro_batch(range(1, 3)).sampling_mask
    assert last is not None
    assert last.tolist() == [[-1], [-1], [-1], [13], [-1], [-1]]
    assert pack([sample([14, 15], [0, 1])]).whole().sampling_mask is None


def test_tokens_of_the_version_that_a_step_begins_with() -> None:
    versions = torch.tensor([-1, 3, 4, 4, 4]).int()
    mixed = replace(sample([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]), versions=versions)
    assert pack([mixed, mixed], version=4).whole().current.tolist() == [0, 1, 0, 1, 0] * 2
    assert not pack([mixed]).whole().current.any()
    packed = pack([mixed, mixed], version=6)
    assert packed.staleness[[0, 1, 3, 5]].tolist() == [3, 2, 2, 3]
    assert packed.whole().staleness is None, "old log-probabilities are not estimated by it"
    packed.scores.staleness = packed.staleness
    assert packed.micro_batch(range(1, 2)).staleness.tolist() == packed.staleness[5:].tolist()


def test_observations_are_what_no_policy_chose_between_its_turns() -> None:
    versions = torch.tensor([-1, -1, 0, 0, -1, -1, 1, -1]).int()
    played = replace(sample([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 0, 0, 0, 1, 0]), versions=versions)
    muted = replace(played, loss_mask=torch.zeros(8))
    packed = pack([played, muted, sample([14, 15], [0, 1])])
    packed.observations = observations([played, muted, sample([14, 15], [0, 1])])
    assert packed.observations.tolist() == [0, 0, 0, 1, 1, 0, 1, 0] + [0] * 10
    packed.observation_weight = 0.25
    batch = packed.whole()
    assert batch.observation_weights is not None
    assert batch.observation_weights.tolist() == [0, 0, 0, 0.25, 0.25, 0, 0.25, 0] + [0] * 10
    assert batch.head_rows.tolist() == [1, 3, 4, 5, 6, 16], "the head is computed for them too"


def test_weights_are_those_of_the_sample_where_its_tokens_are_trained() -> None:
    samples = pack([sample([11, 12, 13], [0, 1, 1]), sample([14, 15], [1, 1])])
    samples.weights, samples.nll_weights = [0.5, 0.25], [0.0, 2.0]
    batch = samples.whole()
    assert batch.weights.tolist() == [0.5, 0.5, 0, 0.25, 0]
    assert batch.nll_weights.tolist() == [0, 0, 0, 2, 0]


def test_no_samples_count_for_nothing() -> None:
    batch = pack([]).whole()
    assert batch.lengths == [len(batch.token_ids)] == [1]
    assert batch.loss_mask.sum() == 0


def test_only_picked_samples_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, step=1, groups=3, size=4)
    (run.path / batch.groups[2].path).unlink()
    refs = [RowRef(1, 3, 0), RowRef(0, 2, 0), RowRef(1, 0, 0)]
    samples = load_rows(run, batch, refs)
    assert samples.refs == refs
    assert samples.lengths == [batch.groups[p.group].lengths[p.index] for p in refs]
    with pytest.raises(DataError, match="missing"):
        load_rows(run, batch, [RowRef(2, 0, 0)])


@pytest.mark.parametrize("least_prefix", [None, 2])
def test_a_file_that_was_replaced_after_the_batch_was_composed_is_refused(
    tmp_path: Path, least_prefix: int | None
) -> None:
    run = make_run(tmp_path / "run")
    batch, other = (make_batch(run, step=step, groups=1, size=4) for step in (1, 2))
    assert load_rows(run, batch, [RowRef(0, 0, 0)], least_prefix).lengths
    (run.path / other.groups[0].path).replace(run.path / batch.groups[0].path)
    with pytest.raises(DataError, match=r"g1-0\.safetensors is damaged .*are expected.*next attempt generates"):
        load_rows(run, batch, [RowRef(0, 0, 0)], least_prefix)


PROMPT, ALIKE = 3, 4


@pytest.mark.parametrize("limit", [MicroBatchLimit(2), MicroBatchLimit(2, 30), MicroBatchLimit(2, 3)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_legacy_mean_weighs_micro_batches_alike(
    tmp_path: Path, alone: World, ranks: int, limit: MicroBatchLimit
) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, step=1, groups=3, size=3)
    (refs,) = mini_batches(batch, 3)
    plan = planned(refs, ranks, (limit, limit))
    sums = []
    for rank, share in enumerate(plan.shares):
        mini = MiniBatch(plan, load_rows(run, batch, share), rank)
        set_loss_weights([mini], batch, alone, Reduction("token_mean_legacy"))
        samples = views([mini.rows])
        parts = [[samples[at] for at in part] for part in plan.train[rank] if part]
        assert all(len({sample.weight for sample in part}) == 1 for part in parts)
        sums += [sum(sample.weight * sample.trained for sample in part) for part in parts]
    assert sums == pytest.approx([1 / len(sums)] * len(sums))
    assert len(sums) > 1


@pytest.fixture
def told(tmp_path: Path) -> tuple[Run, Batch]:
    """Three groups of three; in the last two, the first two responses begin alike, and get different and equal rewards."""
    run = make_run(tmp_path / "run")
    batch = make_batch(run, step=1, groups=3, size=3)
    for number, rewards in ((1, [0.0, 1.0, 0.5]), (2, [1.0, 1.0, 0.5])):
        group = batch.groups[number]
        samples = [make_sample(torch.Generator().manual_seed(seed), 12, PROMPT) for seed in range(3)]
        samples[1].token_ids[PROMPT : PROMPT + ALIKE] = samples[0].token_ids[PROMPT : PROMPT + ALIKE]
        samples[0].token_ids[PROMPT + ALIKE], samples[1].token_ids[PROMPT + ALIKE] = 1, 2
        told = with_columns(group, lengths=[12] * 3, rewards=rewards)
        batch.groups[number] = write_group(run.path / group.path, samples, told)
    return run, batch


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_prefix_that_good_and_bad_share_is_not_trained(told: tuple[Run, Batch], ranks: int) -> None:
    run, batch = told
    (refs,) = mini_batches(batch, 3)
    packed = [load_rows(run, batch, share, ALIKE) for share in assign_to_ranks(refs, ranks)]
    complete = load_rows(run, batch, refs)
    whole = {sample.ref: sample.of(complete.loss_mask) for sample in views([complete])}
    for sample in views(packed):
        expected = whole[sample.ref].clone()
        if sample.ref.group == 1 and sample.ref.index < 2:
            expected[PROMPT - 1 : PROMPT - 1 + ALIKE] = 0  # entry p is about token p + 1
        assert torch.equal(sample.of(sample.packed.loss_mask), expected), sample.ref
    for samples in packed:
        assert samples.left_out == sum(whole[ref].sum() for ref in samples.refs) - samples.loss_mask.sum()
    # each sample has one token in its response that the policy did not choose; it was not trained before either
    assert sum(samples.left_out for samples in packed) == 2 * (ALIKE - 1)
    assert load_rows(run, batch, refs, ALIKE + 1).left_out == 0


def test_a_sample_that_failed_makes_no_prefix_one_of_different_rewards(told: tuple[Run, Batch]) -> None:
    run, batch = told
    batch.groups[1] = with_columns(batch.groups[1], stop_reasons=["failed", "stop", "stop"])
    (refs,) = mini_batches(batch, 3)
    assert load_rows(run, batch, refs, ALIKE).left_out == 0


def test_only_trained_tokens_are_counted(told: tuple[Run, Batch], alone: World) -> None:
    run, batch = told
    counted = {}
    for least in (None, ALIKE):
        algorithm = AlgorithmConfig(min_filter_prefix_tokens=least)
        (mini,) = load(run, batch, algorithm, 3, MicroBatchLimit(1), alone, Reduction("token_mean"))
        assert mini.tokens == sum(mini.rows.trained)
        assert set(mini.rows.weights) == {1 / mini.tokens}
        counted[least] = mini.tokens, mini.left_out
    assert counted[ALIKE] == (counted[None][0] - counted[ALIKE][1], 2 * (ALIKE - 1))
    assert counted[None][1] == 0
