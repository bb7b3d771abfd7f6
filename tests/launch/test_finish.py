"""The end of the batch script, with a stand-in for scontrol that notes how it was called."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.run.commit import write_json, write_text
from hpcrl.run.layout import Run
from hpcrl.run.ledger import Kind, open_attempt, report_outcome

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def start_finish(tmp_path: Path, resume_mode: str, kind: Kind) -> subprocess.Popen[str]:
    run = Run(tmp_path / "run")
    write_text(run.config, Config.from_toml([QUICKSTART], [f"trainer.resume_mode={resume_mode}"]).to_toml())
    open_attempt(run, "7_0.0", ["n1"])
    report_outcome(run, 1, kind, "saved and stopped", "agent-0")
    write_json(tmp_path / "elements.json", [str(run.path)])
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "hpcrl.launch.finish", str(tmp_path / "elements.json")],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_interrupted_run_is_requeued_and_the_script_waits_to_be_ended(tmp_path: Path) -> None:
    with start_finish(tmp_path, "latest", "interrupted") as process:
        deadline = time.monotonic() + 20
        said = ""
        while said.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            said = (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""
        assert said == "requeue 7_0\nupdate JobId=7_0 StartTime=now\n"
        process.terminate()  # Slurm ends the script with the job; a moment too early must do no harm
        time.sleep(0.5)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(
    ("resume_mode", "kind", "code"),
    [("none", "interrupted", 1), ("none", "done", 0), ("latest", "done", 0), ("none", "failed", 1)],
)
def test_nothing_else_is_requeued(tmp_path: Path, resume_mode: str, kind: Kind, code: int) -> None:
    with start_finish(tmp_path, resume_mode, kind) as process:
        said, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert not (tmp_path / "called").exists()
    assert ("not requeued, because trainer.resume_mode is none" in said) == (kind in ("interrupted", "failed"))
