"""Fixtures of the tests of whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.launch.manage.registry import all_runs, states_of
from tests.jobs.small_run import hpcrl


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A working directory; what still runs in it when the test ends is taken away."""
    yield tmp_path
    for state in states_of(all_runs(tmp_path / "runs")):
        if not state.over:
            hpcrl("cancel", "--now", str(state.run.path), cwd=tmp_path)
