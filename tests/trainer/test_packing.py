from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcrl.errors import DataError
from hpcrl.trainer.packing import Row, load_rows, pack, trained_tokens
from hpcrl.trainer.plan import Pick
from hpcrl.types import Sample
from tests.trainer.material import make_batch, make_run

PLACE = Pick(0, 0, 0)


def sample(ids: list[int], mask: list[float]) -> Sample:
    length = len(ids)
    logprobs = -torch.tensor(ids, dtype=torch.float32) / 10 * torch.tensor(mask)
    zeros = torch.zeros(length)
    return Sample(torch.tensor(ids), torch.tensor(mask), logprobs, zeros.int(), zeros, "stop")


def test_labels_are_shifted_once_and_stay_in_their_sample() -> None:
    rows = [
        Row(sample([11, 12, 13], [0, 1, 1]), PLACE, torch.tensor([0.0, 2.0, 3.0])),
        Row(sample([14, 15], [1, 1]), PLACE, torch.tensor([-1.0, -2.0])),
    ]
    batch = pack(rows)
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.lengths == [3, 2]
    assert batch.labels.tolist() == [12, 13, 0, 15, 0]
    assert batch.loss_mask.tolist() == [1, 1, 0, 1, 0]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([-1.2, -1.3, 0, -1.5, 0]))
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [2, 3, 0, -2, 0]
    assert batch.old_logprobs is None
    assert trained_tokens(rows) == batch.loss_mask.sum() == 3


def test_scores_come_back_in_place() -> None:
    rows = [
        Row(sample([1, 2], [0, 1]), PLACE, None, torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])),
        Row(sample([3], [1]), PLACE, None, torch.tensor([3.0]), torch.tensor([7.0])),
    ]
    batch = pack(rows)
    assert batch.advantages is None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    assert batch.old_logprobs.tolist() == [1, 2, 3]
    assert batch.ref_logprobs.tolist() == [5, 6, 7]
    rows[1].ref_logprobs = None
    with pytest.raises(AssertionError, match="have been scored"):
        pack(rows)


def test_weights_are_those_of_the_sample_where_its_tokens_are_trained() -> None:
    rows = [
        Row(sample([11, 12, 13], [0, 1, 1]), PLACE, weight=0.5),
        Row(sample([14, 15], [1, 1]), PLACE),
    ]
    rows[1].weight, rows[1].nll_weight = 0.25, 2.0
    batch = pack(rows)
    assert batch.weights.tolist() == [0.5, 0.5, 0, 0.25, 0]
    assert batch.nll_weights.tolist() == [0, 0, 0, 2, 0]


def test_no_rows_count_for_nothing() -> None:
    batch = pack([])
    assert batch.lengths == [len(batch.token_ids)] == [1]
    assert batch.loss_mask.sum() == 0


def test_only_picked_samples_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, step=1, groups=3, size=4)
    (run.path / batch.groups[2].path).unlink()
    picks = [Pick(1, 3, 0), Pick(0, 2, 0), Pick(1, 0, 0)]
    rows = load_rows(run, batch, picks)
    assert [row.pick for row in rows] == picks
    assert [len(row.sample.token_ids) for row in rows] == [batch.groups[p.group].lengths[p.index] for p in picks]
    with pytest.raises(DataError, match="missing"):
        load_rows(run, batch, [Pick(2, 0, 0)])


@pytest.mark.parametrize("least_prefix", [None, 2])
def test_a_file_that_was_replaced_after_the_batch_was_composed_is_refused(
    tmp_path: Path, least_prefix: int | None
) -> None:
    run = make_run(tmp_path / "run")
    batch, other = (make_batch(run, step=step, groups=1, size=4) for step in (1, 2))
    assert load_rows(run, batch, [Pick(0, 0, 0)], least_prefix)
    (run.path / other.groups[0].path).replace(run.path / batch.groups[0].path)
    with pytest.raises(DataError, match=r"g1-0\.safetensors is damaged .*are expected.*generated again"):
        load_rows(run, batch, [Pick(0, 0, 0)], least_prefix)
