"""docs/own_reward.md as it is typed, in an environment of requirements.lock alone: with a tiny model that knows digits, and with the released one."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import pytest

from tests.cli.typed import blocks, make_locked_environment, run, typed, write_files
from tests.paths import CONFIGS, ROOT

BLOCKS = blocks((ROOT / "docs" / "own_reward.md").read_text())
COMMANDS = [one for _, text in BLOCKS for one in typed(text)]
TINY = CONFIGS / "guess_number" / "model"
RELEASED = CONFIGS / "recipes" / "smollm2" / "model"


def play(place: Path, model: Path, commands: list[tuple[str, list[str]]], settings: str, timeout: float) -> None:
    """Type the page's commands, runs with other settings too, and compare what they print: numbers but those of rows and rewards may differ."""
    make_locked_environment(place)
    (place / "smollm2").symlink_to(model)
    for command, lines in commands:
        if command == "python sums/make_rows.py":  # which the page has replaced by then
            write_files(place, BLOCKS)
        submits = command.startswith("hpcrl submit")
        printed = run(place, f"{command} {settings}" if submits else command, timeout)
        for line in lines:
            for part in line.split("…"):
                assert part.strip() in printed, (command, printed)


def test_everything_before_its_first_run(tmp_path: Path) -> None:
    before = list(takewhile(lambda one: not one[0].startswith("hpcrl submit"), COMMANDS))
    assert len(before) >= 5
    play(tmp_path, TINY, before, "", 300)
    run(tmp_path, "hpcrl submit sums/experiment.toml --local --dry-run")


@pytest.mark.faults_slow
def test_with_a_tiny_model(tmp_path: Path) -> None:
    assert len(COMMANDS) > 10
    play(tmp_path, TINY, COMMANDS, "trainer.max_steps=2 trainer.eval_interval=2", 300)


@pytest.mark.released
def test_with_the_released_model_the_reward_rises(tmp_path: Path) -> None:
    play(tmp_path, RELEASED, COMMANDS, "", 3600)
    (compared,) = re.findall(
        r"^all score +64 +(\S+) +(\S+)", run(tmp_path, "hpcrl compare first@0 first"), re.MULTILINE
    )
    assert float(compared[1]) > float(compared[0]) + 0.2
