"""From a batch on disk to weighed micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.algorithms.reductions import Reduction
from hpcrl.trainer.packing import Row, load_samples, trained_tokens
from hpcrl.trainer.plan import Limit, deal, mini_batches
from hpcrl.trainer.update import MiniBatch, weigh
from hpcrl.trainer.world import World
from tests.trainer.material import make_batch, make_run


@pytest.mark.parametrize("limit", [Limit(2), Limit(2, 30), Limit(2, 3)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_legacy_mean_weighs_micro_batches_alike(tmp_path: Path, alone: World, ranks: int, limit: Limit) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, step=1, groups=3, size=3)
    (picks,) = mini_batches(batch, 3)
    shares = deal(picks, ranks, limit)
    sums = []
    for rank, share in enumerate(shares):
        samples = load_samples(run, batch, share)
        mini = MiniBatch([Row(sample, pick) for sample, pick in zip(samples, share, strict=True)], shares, rank)
        weigh([mini], batch, limit, alone, Reduction("token_mean_legacy"))
        parts = [part for part in mini.micro_batches(limit) if part]
        assert all(len({row.weight for row in part}) == 1 for part in parts)
        sums += [sum(row.weight * trained_tokens([row]) for row in part) for part in parts]
    assert sums == pytest.approx([1 / len(sums)] * len(sums))
    assert len(sums) > 1
