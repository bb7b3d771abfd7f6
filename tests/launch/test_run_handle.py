"""`hpcrl.submit` and `hpcrl.open_run` refuse what the command refuses, with the same text, and leave nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import hpcrl
from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.errors import ConfigError, DataError, HpcrlError, RunError, SubmitError
from hpcrl.launch.submit.checked import checked_submission
from tests.paths import QUICKSTART, ROOT


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and root of runs, without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.delenv("HPCRL_ROOT", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "kind", "local"),
    [
        ("trainer.sed=7", ConfigError, True),
        ("trainer.policy.model.path=/nowhere/model", DataError, True),
        ("slurm.root=/proc/runs", SubmitError, True),
        ("trainer.seed=7", SubmitError, False),
    ],
)
def test_refusals_are_those_of_the_command(
    place: Path, capsys: pytest.CaptureFixture[str], override: str, kind: type[HpcrlError], local: bool
) -> None:
    overrides = [override, "trainer.run_name=first"]
    code = main(["submit", str(QUICKSTART), *overrides, *(["--local"] if local else [])])
    printed = capsys.readouterr().err
    for config in (QUICKSTART, str(QUICKSTART), [QUICKSTART], Config.from_toml(QUICKSTART)):
        with pytest.raises(kind) as caught:
            hpcrl.submit(config, overrides, local=local)
        assert caught.type.exit_code == code
        assert str(caught.value) in printed or isinstance(config, Config)
    assert not list(place.iterdir())


def test_a_configuration_built_by_hand_is_checked() -> None:
    config = Config.from_toml(QUICKSTART)
    wrong = replace(config, trainer=replace(config.trainer, train_batch_size=-1))
    with pytest.raises(ConfigError, match="train_batch_size"):
        hpcrl.submit(wrong, local=True)

    @dataclass(frozen=True, kw_only=True)
    class Own(Config):
        speed: float = 1.0

    with pytest.raises(ConfigError, match=r'config_class: .*set config_class to "module:'):
        hpcrl.submit(Own.from_toml(QUICKSTART), local=True)


def test_relative_paths_of_a_configuration_count_from_here(place: Path) -> None:
    (place / "t.parquet").write_bytes(b"")
    config = Config.from_dict(
        {**Config.from_toml(QUICKSTART).to_dict(), "data.train_data": ["./t.parquet", "t.parquet"]}
    )
    assert config.with_overrides().data.train_data == [str(place / "t.parquet")] * 2


def test_a_configuration_is_submitted_as_its_file_is(place: Path) -> None:
    overrides = ["trainer.run_name=first", "trainer.seed=7"]
    by_file, _ = checked_submission([QUICKSTART], overrides, [[]])
    by_config, _ = checked_submission(Config.from_toml(QUICKSTART), overrides, [[]])
    assert by_config == by_file
    assert by_file.runs[0].path == place / "runs" / "quickstart" / "first"


def test_a_local_run_is_started_by_the_main_thread(place: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(SubmitError, match="main thread"):
        pool.submit(hpcrl.submit, QUICKSTART, local=True).result()
    assert not list(place.iterdir())


def test_overrides_of_a_configuration() -> None:
    config = Config.from_toml(QUICKSTART)
    assert config.with_overrides() == config
    changed = config.with_overrides(["trainer.seed=7", "trainer.max_steps=default"])
    assert (changed.trainer.seed, changed.trainer.max_steps) == (7, None)
    assert changed == Config.from_toml(QUICKSTART, ["trainer.seed=7", "trainer.max_steps=default"])
    with pytest.raises(ConfigError, match=r'override: trainer.seed: expected a whole number, found "x"'):
        config.with_overrides("trainer.seed=x")


def submitted(place: Path, name: str = "first") -> hpcrl.RunHandle:
    """Return a run directory as a submission that was cut short leaves it."""
    path = place / "runs" / "quickstart" / name
    path.mkdir(parents=True)
    (path / "config.toml").write_text(Config.from_toml(QUICKSTART).to_toml())
    (path / "submission.json").write_text('{"executor": "local", "host": "elsewhere", "job_id": "1"}')
    return hpcrl.open_run(name)


def test_runs_are_found_as_by_the_commands(place: Path) -> None:
    with pytest.raises(RunError, match="no run 'first' under"):
        hpcrl.open_run("first")
    run = submitted(place)
    for other in (hpcrl.open_run("quickstart/first"), hpcrl.open_run(run.path), eval(repr(run))):
        assert other.path == run.path
    assert hpcrl.open_run("first", root=place / "runs").config() == Config.from_toml(QUICKSTART)
    with pytest.raises(RunError, match="no run 'first' under"):
        hpcrl.open_run("first", root=place / "others")
    with pytest.raises(RunError, match=r"first exists; choose another trainer.run_name"):
        hpcrl.submit(QUICKSTART, "trainer.run_name=first", local=True)


def test_a_run_that_has_trained_nothing(place: Path) -> None:
    run = submitted(place)
    assert (run.state().kind, run.metrics(), run.evaluations(), run.alerts()) == ("unknown", [], [], [])
    for read in (run.samples, run.evaluation):
        with pytest.raises(RunError, match="first has no"):
            read()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"first is unknown after 0\.2 s, and continues: .*ask there"):
        run.wait(timeout=0.2)
    assert time.monotonic() - began < 30
    (run.path / "submission.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        run.wait(timeout=60)


def test_importing_hpcrl_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import hpcrl; own = set(sys.modules) - before - {'hpcrl'}\n"
        "print(sorted(own)); print(set(dir(hpcrl)) >= set(hpcrl._PUBLIC)); hpcrl.submit; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split("\n")[:3] == ["[]", "True", "False"]
    with pytest.raises(AttributeError, match="has no attribute 'sumbit'"):
        getattr(hpcrl, "sumbit")  # noqa: B009


def test_type_checkers_see_the_same_names() -> None:
    stub = (ROOT / "hpcrl" / "__init__.pyi").read_text()
    assert set(re.findall(r" as (\w+)$", stub, re.MULTILINE)) == set(hpcrl._PUBLIC)
