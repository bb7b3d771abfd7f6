"""What a step trains is what its dump says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from hpcrl.run.commit import committed, verify
from hpcrl.run.layout import Run, step_of
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.dump import Dumps
from hpcrl.trainer.plan import Limit
from hpcrl.trainer.update import MiniBatch, load_mini_batches
from hpcrl.trainer.world import World
from hpcrl.types import Batch
from tests.trainer.material import make_batch, make_run

OPTIONAL = {"old_logprobs", "ref_logprobs", "values", "returns"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")


def minis_of(run: Run, batch: Batch, world: World) -> list[MiniBatch]:
    """Return mini-batches of two groups, of which the last has been scored."""
    algorithm = AlgorithmConfig()
    minis = load_mini_batches(run, batch, algorithm, 2, Limit(2), world, Reduction())
    estimate_advantages(batch, [row for mini in minis for row in mini.rows], algorithm, world.sum)
    for row in minis[-1].rows:
        size = len(row.sample.token_ids)
        row.old_logprobs, row.ref_logprobs = -torch.rand(size), -torch.rand(size)
        row.values, row.returns = torch.rand(size), torch.rand(size)
    return minis


def test_a_dump_has_every_token(run: Run, alone: World) -> None:
    batch = make_batch(run, step=7, groups=3, size=2)
    minis = minis_of(run, batch, alone)
    Dumps(run, 1, alone).write(batch, minis, alone)
    files = [run.dump(7) / f"mini-{number}-rank-0.safetensors" for number in range(2)]
    assert set(verify(run.dump(7))["files"]) == {file.name for file in files}
    for file, mini, present in zip(files, minis, (set(), OPTIONAL), strict=True):
        found = load_file(file)
        assert found.keys() & OPTIONAL == present
        with safe_open(file, "pt") as opened:
            ids = json.loads(opened.metadata()["group_ids"])
        assert ids == [batch.groups[row.pick.group].group_id for row in mini.rows]
        lengths = found["lengths"].tolist()
        for at, row in enumerate(mini.rows):
            part = {name: value.split(lengths)[at] for name, value in found.items() if len(value) == sum(lengths)}
            assert (found["groups"][at], found["samples"][at]) == (row.pick.group, row.pick.index)
            assert torch.equal(part["token_ids"], row.sample.token_ids)
            # from here on entry p is about token p + 1
            assert torch.equal(part["labels"][:-1], row.sample.token_ids[1:])
            assert torch.equal(part["loss_mask"][:-1], row.sample.loss_mask[1:])
            assert torch.equal(part["rewards"][:-1], row.sample.rewards[1:])
            assert torch.equal(part["rollout_logprobs"][:-1], row.sample.rollout_logprobs[1:])
            assert row.advantages is not None
            assert torch.equal(part["advantages"][:-1], row.advantages[1:])
            assert torch.equal(part["weights"][:-1], row.weight * row.sample.loss_mask[1:])
            for name in present & {"old_logprobs", "ref_logprobs", "values"}:
                assert torch.equal(part[name], getattr(row, name))
            assert all(part[name][-1] == 0 for name in ("loss_mask", "weights", "rewards", "advantages"))


def test_a_rank_without_samples_writes_no_token(run: Run, alone: World) -> None:
    batch = make_batch(run, step=1, groups=1, size=2)
    Dumps(run, 1, alone).write(batch, [MiniBatch([], [[]], 0)], alone)
    found = load_file(run.dump(1) / "mini-0-rank-0.safetensors")
    assert {"token_ids", "advantages", "lengths", "groups"} <= found.keys()
    assert all(len(value) == 0 for value in found.values())


def test_steps_that_are_trained_again_lose_their_dumps(run: Run, alone: World) -> None:
    for step in (1, 2, 3):
        batch = make_batch(run, step, groups=2, size=2)
        Dumps(run, 1, alone).write(batch, minis_of(run, batch, alone)[:1], alone)
    unfinished = run.dumps / ".tmp-s000004.1"
    unfinished.mkdir()
    Dumps(run, 2, alone).resume(1)
    assert committed(run.dumps, step_of) == [1]
    assert [path.name for path in run.dumps.iterdir()] == ["s000001"]
    batch = make_batch(run, 2, groups=2, size=2)
    Dumps(run, 2, alone).write(batch, minis_of(run, batch, alone)[:1], alone)
    assert verify(run.dump(2))["attempt"] == 2
