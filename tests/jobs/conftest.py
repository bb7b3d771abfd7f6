"""Fixtures of the tests of whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.launch.manage.registry import all_runs, states_of
from hpcrl.rundir.commit import write_json
from tests.faults.scenario import STAND_IN
from tests.jobs.small_run import hpcrl


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A working directory; what still runs in it when the test ends is taken away."""
    yield tmp_path
    for state in states_of(all_runs(tmp_path / "runs")):
        if not state.over:
            hpcrl("cancel", "--now", str(state.run.path), cwd=tmp_path)


@pytest.fixture
def stand_in_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs have the engine of tests/faults/stand_in, where vLLM, whose start takes longer than the run, is not what is tested."""
    write_json(tmp_path / "knobs.json", {})
    monkeypatch.setenv("STAND_IN", str(tmp_path / "knobs.json"))
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
