"""A checkpoint of a stranger runs no code, whoever reads it: a run that begins from it, an export, an evaluation, and what verifies it.

A replay of it: tests/trainer/test_job.py; Megatron-core's: tests/trainer/backends/megatron/test_state.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import CommitError, DataError
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.checkpoint import Checkpoints
from tests.paths import ROOT
from tests.trainer import scenarios
from tests.trainer.launcher import environment
from tests.trainer.material import make_batch, make_run
from tests.trainer.saving.hostile import REFUSED, make_hostile
from tests.trainer.saving.life import Life


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, alone: World, model_path: Path) -> Run:
    """A run of one step with its checkpoint."""
    place = tmp_path_factory.mktemp("saved")
    source = make_run(place / "source")
    make_batch(source, 1, groups=4, size=3)
    life = Life(alone, {"out": str(place / "out"), "run": str(source.path), "model": str(model_path)}, "theirs")
    open_attempt(life.run, "7.0", ["n1"])
    life.train(1)
    assert life.save(1) == "ok"
    config = {
        "data": {"train_data": ["t"]},
        "trainer": {"policy": {"model": {"path": str(model_path)}}, "eval_interval": 0},
        "generator": {"inference_engine": {"model_dtype": "float32"}},
    }
    write_text(life.run.config, Config.from_dict(config).to_toml())
    return life.run


@pytest.fixture
def run(saved: Run, tmp_path: Path) -> Run:
    """A copy of it, which may be changed."""
    shutil.copytree(saved.path, tmp_path / "theirs")
    return Run(tmp_path / "theirs")


def hpcrl(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "hpcrl.cli.main", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_run_does_not_begin_from_it(run: Run, alone: World, model_path: Path, tmp_path: Path) -> None:
    engine, path = scenarios.make_engine(alone, str(model_path), {}), run.checkpoint(1)
    own = Checkpoints(Run(tmp_path / "own"), 1, alone, keep=Retention(), seed=0)
    assert own.resume(engine, None, "from_path", str(path)).step == 1
    marker = make_hostile(path)
    with pytest.raises(CommitError, match=f"{path}/{REFUSED}"):
        Checkpoints(Run(tmp_path / "other"), 1, alone, keep=Retention(), seed=0).resume(
            engine, None, "from_path", str(path)
        )
    assert not marker.exists()


def test_an_engine_does_not_load_it_either(run: Run, alone: World, model_path: Path) -> None:
    """Whatever was verified before."""
    engine, path = scenarios.make_engine(alone, str(model_path), {}), run.checkpoint(1)
    shutil.copytree(path, path / "critic")
    engine.restore(path / "critic")
    marker = make_hostile(path / "critic")
    for load in (engine.restore, engine.restore_weights):
        with pytest.raises(CommitError, match=f"{path}/critic/{REFUSED}"):
            load(path / "critic")
    assert not marker.exists()


@pytest.mark.parametrize("folder", ["", "critic"])
def test_commands_that_verify_say_so(run: Run, folder: str) -> None:
    path = run.checkpoint(1)
    if folder:
        (path / folder).mkdir()
        shutil.copy(path / ".metadata", path / folder)
    marker = make_hostile(path, folder)
    code, output = hpcrl("checkpoint", "verify", str(run.path))
    assert code == 1
    assert re.search(rf"s000001: damaged: {path / folder}/{REFUSED}", output), output
    code, output = hpcrl("verify", str(run.path))
    assert code == DataError.exit_code
    assert re.search(rf"{path / folder}/{REFUSED}", output), output
    assert not marker.exists()


def test_it_is_not_exported(run: Run, tmp_path: Path) -> None:
    marker = make_hostile(run.checkpoint(1))
    code, output = hpcrl("checkpoint", "export", str(run.path), "-o", str(tmp_path / "export"))
    assert not marker.exists()
    assert code == CommitError.exit_code
    assert re.search(f"hpcrl: .*{REFUSED}", output), output
    assert not (tmp_path / "export").exists()


def test_it_is_not_evaluated(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "letters.jsonl"
    rows.write_text(json.dumps({"prompt": "sort: ba", "reward_spec": {"ground_truth": "ab"}}) + "\n")
    marker = make_hostile(run.checkpoint(1))
    code, output = hpcrl(
        "eval", str(run.path), "--data", str(rows), "environment.env_class=sort_letters",
        "generator.inference_engine.backend=transformers", "--output", str(tmp_path / "place"),
    )  # fmt: skip
    assert not marker.exists()
    assert code == CommitError.exit_code
    assert re.search(f"hpcrl: .*{REFUSED}", output), output


def test_only_two_modules_unpickle_files_or_load_checkpoints() -> None:
    """What another one reads has to be looked at before it is added here."""
    risky = re.compile(
        r"\b(pickle\.loads?\b|Unpickler|torch\.load\b|state_dict_loader|cloudpickle|joblib|marshal|shelve|yaml\.load\b|allow_pickle=True)"
    )
    files = [path for folder in ("hpcrl", "jobs") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if risky.search(path.read_text())}
    assert found == {"hpcrl/rundir/checkpoint_index.py", "hpcrl/trainer/backends/shards.py"}
