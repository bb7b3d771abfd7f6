"""docs/tutorial.md up to its cluster, as it is typed, in an environment of requirements.lock alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.environments import make_environment
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
LOCAL = PAGE.partition("## 2. ")[2].partition("## 5. ")[0]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", LOCAL, re.MULTILINE | re.DOTALL)


def typed(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a block, each with the lines that it prints; shortened ones end in …"""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, printed.splitlines()) for command, _, printed in (part.partition("\n") for part in parts)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the tutorial is typed, with the files that it shows."""
    place = tmp_path_factory.mktemp("tutorial")
    shutil.copytree(ROOT / "configs" / "quickstart", place / "configs" / "quickstart")
    (place / "mine").mkdir()
    for _, text in BLOCKS:
        if name := re.match(r"# (mine/\S+)\n", text):
            (place / name[1]).write_text(text)
    lock = [line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
    absent = {"async-timeout", "exceptiongroup", "setuptools", "typing_extensions"}  # by version of Python
    make_environment(place / ".venv", ["torch", *(name for name in lock if name not in absent)])
    return place


def run(place: Path, command: str) -> str:
    environment = {**os.environ, "PATH": f"{place / '.venv' / 'bin'}:{os.environ['PATH']}"}
    for name in ("HPCRL_ROOT", "PYTHONPATH"):
        environment.pop(name, None)
    done = subprocess.run(
        ["bash", "-c", command], cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_before_the_cluster(place: Path) -> None:
    (made,) = re.findall(r"run it there: `(.*?)`", LOCAL)
    run(place, made)
    commands = [one for _, text in BLOCKS for one in typed(text)]
    assert len(commands) >= 4
    for command, lines in commands:
        printed = run(place, command)
        for line in lines:
            for part in line.split("…"):
                assert part.strip() in printed, (command, printed)


@pytest.mark.faults_slow
def test_its_experiment_runs_on_this_machine(place: Path) -> None:
    if not (place / "mine" / "train.jsonl").exists():
        run(place, "cd mine && python make_rows.py")
    (command,) = re.findall(r"^`(hpcrl submit mine/four.toml --local --follow)` would run it", LOCAL, re.MULTILINE)
    printed = run(place, f"{command} trainer.max_steps=2 trainer.eval_interval=2")
    assert "done: finished" in printed
    assert "eval score" in printed
