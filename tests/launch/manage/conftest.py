"""A run directory whose state is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from tests.launch.manage.slurm_records import CONFIG


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "runs" / "project" / "mine")
    write_text(run.config, CONFIG)
    return run
