"""What a step trains is what its dump says."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hpcrl import faults
from hpcrl.config import AlgorithmConfig
from hpcrl.errors import CommitError
from hpcrl.rundir.commit import committed, verify
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import open_attempt
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.batching import MicroBatchLimit, plan_mini_batch
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import MiniBatch, pack
from hpcrl.trainer.saving.dump import Dumps
from hpcrl.types import Batch
from tests.rows import read_tensors
from tests.trainer.material import load, make_batch, make_run, views
from tests.trainer.ranks import Ranks

OPTIONAL = {"old_logprobs", "ref_logprobs", "entropies", "values", "returns"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")


def minis_of(run: Run, batch: Batch, world: World) -> list[MiniBatch]:
    """Return mini-batches of two groups, of which the last has been scored."""
    algorithm = AlgorithmConfig()
    minis = load(run, batch, algorithm, 2, MicroBatchLimit(2), world)
    estimate_advantages(batch, [mini.rows for mini in minis], algorithm, world.sum)
    scores, size = minis[-1].rows.scores, len(minis[-1].rows.token_ids)
    scores.old_logprobs, scores.ref_logprobs = -torch.rand(size), -torch.rand(size)
    scores.entropies = torch.rand(size)
    scores.values, scores.returns = torch.rand(size), torch.rand(size)
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
        assert ids == [batch.groups[ref.group].group_id for ref in mini.rows.refs]
        lengths = found["lengths"].tolist()
        for at, row in enumerate(views([mini.rows])):
            part = {name: value.split(lengths)[at] for name, value in found.items() if len(value) == sum(lengths)}
            assert (found["groups"][at], found["samples"][at]) == (row.ref.group, row.ref.index)
            path = run.path / batch.groups[row.ref.group].path
            (sample,) = read_tensors(path, [row.ref.index])
            assert torch.equal(part["token_ids"], sample.token_ids)
            # from here on entry p is about token p + 1
            assert torch.equal(part["labels"][:-1], sample.token_ids[1:])
            assert torch.equal(part["loss_mask"][:-1], sample.loss_mask[1:])
            assert torch.equal(part["rewards"][:-1], sample.rewards[1:])
            assert torch.equal(part["rollout_logprobs"][:-1], sample.rollout_logprobs[1:])
            assert torch.equal(part["advantages"], row.of(mini.rows.scores.advantages))
            assert torch.equal(part["weights"][:-1], row.weight * sample.loss_mask[1:])
            for name in present & {"old_logprobs", "ref_logprobs", "entropies", "values"}:
                assert torch.equal(part[name], row.of(mini.rows.scores.present()[name]))
            assert all(part[name][-1] == 0 for name in ("loss_mask", "weights", "rewards", "advantages"))


def test_a_rank_without_samples_writes_no_token(run: Run, alone: World) -> None:
    batch, limit = make_batch(run, step=1, groups=1, size=2), MicroBatchLimit(1)
    empty = MiniBatch(plan_mini_batch([[]], limit, limit), pack([]), 0)
    Dumps(run, 1, alone).write(batch, [empty], alone)
    found = load_file(run.dump(1) / "mini-0-rank-0.safetensors")
    assert {"token_ids", "advantages", "lengths", "groups"} <= found.keys()
    assert all(len(value) == 0 for value in found.values())


def test_steps_that_are_trained_again_lose_their_dumps(run: Run, alone: World) -> None:
    dumps = Dumps(run, 1, alone)
    for step in (1, 2, 3):
        batch = make_batch(run, step, groups=2, size=2)
        dumps.write(batch, minis_of(run, batch, alone)[:1], alone)
    unfinished = run.dumps / ".tmp-s000004.1"
    unfinished.mkdir()
    dumps = Dumps(run, 2, alone)
    dumps.resume(1)
    assert committed(run.dumps, step_of) == [1]
    assert [path.name for path in run.dumps.iterdir()] == ["s000001"]
    batch = make_batch(run, 2, groups=2, size=2)
    dumps.write(batch, minis_of(run, batch, alone)[:1], alone)
    assert verify(run.dump(2))["attempt"] == 2


@pytest.mark.parametrize("point", ["begin", "written", "manifest"])
def test_a_full_disk_is_explained_and_leaves_nothing(
    run: Run, alone: World, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(run, 1, groups=2, size=2)
    minis, dumps = minis_of(run, batch, alone)[:1], Dumps(run, 1, alone)
    faults._passed.clear()
    monkeypatch.setenv("HPCRL_FAULT", f"dumps.{point}:raise=ENOSPC")
    with pytest.raises(CommitError, match=r"s000001 could not be written: No space left on device .*; make room"):
        dumps.write(batch, minis, alone)
    assert list(run.dumps.iterdir()) == []
    dumps.write(batch, minis, alone)
    assert committed(run.dumps, step_of) == [1]


def test_what_one_rank_cannot_write_fails_on_all(run: Run, tmp_path: Path, two: Ranks) -> None:
    make_batch(run, 1, groups=2, size=2)
    two.play([("saving.test_dump:on_a_full_disk", {"run": str(run.path), "out": str(tmp_path / "error")})])
    errors = [(tmp_path / f"error.{rank}").read_text() for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert "s000001 could not be written: File too large" in errors[0]
    assert list(run.dumps.iterdir()) == []


def on_a_full_disk(world: World, options: dict[str, Any]) -> None:
    """Each rank writes down what it is told where the second one may not write any file."""
    run, soft = Run.open(options["run"]), resource.getrlimit(resource.RLIMIT_FSIZE)
    batch = Batch.from_json(json.loads(run.batch(1).read_text()))
    minis = minis_of(run, batch, world)[:1]
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, soft[1]))
    try:
        Dumps(run, 1, world).write(batch, minis, world)
    except CommitError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    Path(f"{options['out']}.{world.rank}").write_text(message)


def test_an_older_attempt_touches_nothing(run: Run, alone: World) -> None:
    batch = make_batch(run, 1, groups=2, size=2)
    minis = minis_of(run, batch, alone)[:1]
    for number in (1, 2):
        open_attempt(run, f"7.{number}", [f"node-{number}"])
    Dumps(run, 2, alone).write(batch, minis, alone)
    for late in (lambda dumps: dumps.write(batch, minis, alone), lambda dumps: dumps.resume(0)):
        with pytest.raises(CommitError, match="attempt 1 of run writes no more"):
            late(Dumps(run, 1, alone))
    assert verify(run.dump(1))["attempt"] == 2
    assert [path.name for path in run.dumps.iterdir()] == ["s000001"]
