"""`hpcrl init`: experiments that validate as they are, and folders and models that it refuses."""

from __future__ import annotations

import errno
import os
import runpy
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from tests.paths import QUICKSTART

KINDS = ["rl", "sft", "dpo", "environment"]
MODEL = QUICKSTART.parent / "quickstart" / "model"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_submitted_as_it_is(place: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "a/mine", "--kind", kind]) == 0
    wrote = [line.removeprefix("wrote ") for line in capsys.readouterr().out.splitlines() if line.startswith("wrote ")]
    assert sorted(wrote) == sorted(str(path.relative_to(place)) for path in (place / "a" / "mine").iterdir())
    runpy.run_path("a/mine/make_rows.py", run_name="__main__")
    assert main(["config", "validate", "a/mine/experiment.toml"]) == 0
    assert main(["submit", "a/mine/experiment.toml", "--local", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "node 0: trainer, 1 rank(s) and the controller" in printed.out
    assert f"{place}/runs/mine/experiment-" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_repeats_a_default(kind: str) -> None:
    main(["init", "mine", "--kind", kind])
    settings = Path("mine/experiment.toml").read_text().splitlines()
    paths, table = [], ""
    for line in settings:
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif line and not line.startswith("#"):
            paths.append(table + line.partition(" = ")[0])
    changed = Config.from_toml([Path("mine/experiment.toml")]).to_toml(only_changed=True)
    assert len(paths) < 25
    for path in paths:
        assert f"{path.rpartition('.')[2]} = " in changed or f"[{path}]" in changed, path


def test_names_of_models(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(MODEL, place / "models" / "tiny")
    for folder, named, written in (
        ("a", "models/tiny", "../models/tiny"),
        ("models", "models/tiny", "./tiny"),
        ("b", str(place / "models" / "tiny"), str(place / "models" / "tiny")),
        ("c", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    ):
        assert main(["init", folder, "--model", named]) == 0
        text = (place / folder / "experiment.toml").read_text()
        assert f'path = "{written}"\n' in text
        assert "lr = 1e-5\n" in text
        assert not (place / folder / "model").exists()
    capsys.readouterr()
    for named in ("models", "elsewhere", "./no/such", "/no/such"):
        assert main(["init", "d", "--model", named]) == 4
        assert f"--model: {named} has no config.json; expected a folder with a model" in capsys.readouterr().err
    assert not Path("d").exists()


def test_a_name_that_no_project_can_have() -> None:
    assert main(["init", 'my "first" é']) == 0
    assert Config.from_toml([Path('my "first" é/experiment.toml')]).trainer.project_name == "my-first"


@pytest.mark.parametrize("name", ["make_rows.py", "rewards.py", "model", "experiment.toml", "train.jsonl"])
def test_nothing_is_overwritten(place: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mine = place / "mine"
    mine.mkdir()
    (mine / name).symlink_to("gone")
    (mine / "notes.txt").write_text("mine")
    assert main(["init", "mine"]) == 2
    assert f"mine has {name} already; nothing was written" in capsys.readouterr().err
    assert sorted(path.name for path in mine.iterdir()) == sorted([name, "notes.txt"])
    (mine / name).unlink()
    assert main(["init", "mine"]) == 0
    assert (mine / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_nothing(
    place: Path, there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if there:
        (place / "mine").mkdir()

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["init", "mine"]) == 3
    assert "hpcrl: mine: No space left on device; nothing was written" in capsys.readouterr().err
    assert list(place.rglob("*")) == [place / "mine"] * there


def test_a_folder_that_is_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "mine").write_text("")
    for folder in ("mine", "mine/deeper"):
        assert main(["init", folder]) == 3
        assert f"hpcrl: {folder}: " in capsys.readouterr().err
