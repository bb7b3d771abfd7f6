"""Whole runs of ranks that share the tokens of each sample: every number is that of one rank, also where sizes change inside of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.rundir.layout import Run
from tests.trainer.critic.test_ranks import assert_same_models, settings
from tests.trainer.saving.test_mid_batch import Attempts, assert_same, made, told_by
from tests.trainer.scenarios import laid_over

pytestmark = pytest.mark.faults_slow


def shared(path: Path, model: Path, size: int, critic: int | None = None, size_of_critic: int | None = None) -> Run:
    """Return a run whose policy has so many ranks, all with the same samples; and its critic, where it has its own."""
    sizes = {"policy": {"sequence_parallel_size": size}, "critic": {"sequence_parallel_size": size_of_critic}}
    sizes = {role: own for role, own in sizes.items() if own["sequence_parallel_size"] is not None}
    return made(path, model, laid_over(settings(model, size, critic), {"trainer": sizes}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("sequence")
    runs = {name: shared(folder / name, model_path, size) for name, size in (("one", 1), ("two", 2), ("moved", 2))}
    two, one = Attempts(folder), Attempts(folder)
    two.of(runs["two"], [""])
    two.of(runs["moved"], ["update.micro_batch@7:signal=SIGTERM"])
    two.make(2)
    one.of(runs["one"], [""])
    one.of(runs["moved"], [""], first=2, config=runs["one"].config)
    one.make(1)
    return runs


def test_two_ranks_are_as_one(runs: dict[str, Run], tmp_path: Path) -> None:
    assert_same_models(runs["two"], runs["one"], tmp_path, 1e-5)
    dumped = {path.name for path in runs["two"].dump(1).glob("mini-0-*")}
    assert dumped == {"mini-0-rank-0.safetensors"}, "one of the ranks tells of the samples"


def test_a_run_goes_on_with_another_size(runs: dict[str, Run]) -> None:
    first, last = told_by(runs["moved"])
    assert (first["said"], last["said"]) == ("stopped", "finished")
    assert first["positions"][-1][1] > 0, "inside of a step"
    assert_same(runs["moved"], runs["one"], 1e-5)


@pytest.mark.parametrize(("critic", "size"), [(1, 1), (2, 2), (2, 1)])
def test_a_critic_on_ranks_of_its_own(
    runs: dict[str, Run], tmp_path: Path, model_path: Path, critic: int, size: int
) -> None:
    run, attempts = shared(tmp_path / "run", model_path, 2, critic, size), Attempts(tmp_path)
    attempts.of(run, [""])
    attempts.make(2 + critic)
    assert_same_models(run, runs["one"], tmp_path, 1e-5)
