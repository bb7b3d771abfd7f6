"""docs/tutorial.md up to its cluster, as it is typed, in an environment of requirements.lock alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cli.typed import blocks, make_locked_environment, run, typed, write_files
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
LOCAL = PAGE.partition("## 2. ")[2].partition("## 5. ")[0]
BLOCKS = blocks(LOCAL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the tutorial is typed, with the files that it shows."""
    place = tmp_path_factory.mktemp("tutorial")
    shutil.copytree(ROOT / "configs" / "quickstart", place / "configs" / "quickstart")
    write_files(place, BLOCKS)
    make_locked_environment(place)
    return place


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
