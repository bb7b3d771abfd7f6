"""What commands do with each run of a sweep."""

from __future__ import annotations

import threading
from argparse import Namespace
from pathlib import Path

import pytest

from hpcrl.cli._common import each_run
from hpcrl.errors import RunError
from hpcrl.rundir.layout import Run


def test_one_at_a_time_is_in_the_main_thread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hpcrl resume` of a sweep on this machine: only the main thread can start such a run."""
    (tmp_path / "project" / ".slurm" / "sweep").mkdir(parents=True)
    for name in ("sweep.0", "sweep.1"):
        run = Run(tmp_path / "project" / name)
        run.path.mkdir()
        run.config.touch()
        run.slurm.symlink_to("../.slurm/sweep")
    seen = list[tuple[str, threading.Thread]]()

    def act(run: Run) -> None:
        seen.append((run.name, threading.current_thread()))
        if run.name == "sweep.0":
            raise RunError("not this one")

    assert each_run(Namespace(run="sweep", root=tmp_path), act) == RunError.exit_code
    assert seen == [("sweep.0", threading.main_thread()), ("sweep.1", threading.main_thread())]
    assert capsys.readouterr().err == "hpcrl: not this one\n"
