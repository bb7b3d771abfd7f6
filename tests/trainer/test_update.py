"""From a batch on disk to weighed micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from hpcrl.data.samples import write_group
from hpcrl.run.layout import Run
from hpcrl.trainer.packing import load_rows, trained_tokens
from hpcrl.trainer.plan import Limit, deal, mini_batches
from hpcrl.trainer.update import MiniBatch, load_mini_batches, weigh
from hpcrl.trainer.world import World
from hpcrl.types import Batch
from tests.trainer.material import make_batch, make_run, make_sample

PROMPT, ALIKE = 3, 4


@pytest.mark.parametrize("limit", [Limit(2), Limit(2, 30), Limit(2, 3)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_legacy_mean_weighs_micro_batches_alike(tmp_path: Path, alone: World, ranks: int, limit: Limit) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, step=1, groups=3, size=3)
    (picks,) = mini_batches(batch, 3)
    shares = deal(picks, ranks, limit)
    sums = []
    for rank, share in enumerate(shares):
        mini = MiniBatch(load_rows(run, batch, share), shares, rank)
        weigh([mini], batch, limit, alone, Reduction("token_mean_legacy"))
        parts = [part for part in mini.micro_batches(limit) if part]
        assert all(len({row.weight for row in part}) == 1 for part in parts)
        sums += [sum(row.weight * trained_tokens([row]) for row in part) for part in parts]
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
        group.lengths[:] = [12] * 3
        samples[1].token_ids[PROMPT : PROMPT + ALIKE] = samples[0].token_ids[PROMPT : PROMPT + ALIKE]
        samples[0].token_ids[PROMPT + ALIKE], samples[1].token_ids[PROMPT + ALIKE] = 1, 2
        group.rewards[:] = rewards
        write_group(run.path / group.path, samples, group)
    return run, batch


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_prefix_that_good_and_bad_share_is_not_trained(told: tuple[Run, Batch], ranks: int) -> None:
    run, batch = told
    (picks,) = mini_batches(batch, 3)
    rows = [row for share in deal(picks, ranks, Limit(1)) for row in load_rows(run, batch, share, ALIKE)]
    whole = {row.pick: row for row in load_rows(run, batch, picks)}
    for row in rows:
        expected = whole[row.pick].sample.loss_mask.clone()
        if row.pick.group == 1 and row.pick.index < 2:
            expected[PROMPT : PROMPT + ALIKE] = 0
        assert torch.equal(row.sample.loss_mask, expected), row.pick
        assert row.left_out == (whole[row.pick].sample.loss_mask - expected).sum()
    # each sample has one token in its response that the policy did not choose; it was not trained before either
    assert sum(row.left_out for row in rows) == 2 * (ALIKE - 1)
    assert sum(row.left_out for row in load_rows(run, batch, picks, ALIKE + 1)) == 0


def test_only_trained_tokens_are_counted(told: tuple[Run, Batch], alone: World) -> None:
    run, batch = told
    counted = {}
    for least in (None, ALIKE):
        algorithm = AlgorithmConfig(min_filter_prefix_tokens=least)
        (mini,) = load_mini_batches(run, batch, algorithm, 3, Limit(1), alone, Reduction("token_mean"))
        assert mini.tokens == trained_tokens(mini.rows)
        assert {row.weight for row in mini.rows} == {1 / mini.tokens}
        counted[least] = mini.tokens, mini.left_out
    assert counted[ALIKE] == (counted[None][0] - counted[ALIKE][1], 2 * (ALIKE - 1))
    assert counted[None][1] == 0
