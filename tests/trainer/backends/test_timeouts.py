"""A rank that hangs is told by the agent that watches it, before torch ends what waits for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.launcher import run_ranks

FOUR = {"all ranks": 4, "control": 4, "behind": 4, "copies": 2, "shards": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("patience", "expected"),
    [
        ({}, 7200.0),
        ({"step_seconds": 5 * 3600}, 5 * 3600 + 300.0),
        ({"save_seconds": 0}, 365 * 24 * 3600.0),
    ],
)
def test_every_group_waits_longer_than_the_agent(tmp_path: Path, patience: dict[str, int], expected: float) -> None:
    done = run_ranks(4, tmp_path / "found.json", json.dumps(patience), script="trainer/backends/timeout_ranks.py")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sizes"] == FOUR
    assert found["timeouts"] == dict.fromkeys(FOUR, expected)
