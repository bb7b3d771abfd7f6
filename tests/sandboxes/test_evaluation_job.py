"""The evaluation job of a run whose environment wants sandboxes: it serves them itself. Run as an ordinary user, with a real engine."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest

from hpcrl.config import Config
from hpcrl.controller.evaluation import begin_evaluation
from hpcrl.rundir.commit import read_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.sandboxes.images import ImageStore
from tests.paths import CONFIGS, ROOT
from tests.sandboxes.material import python_of_users


@pytest.mark.faults_slow
def test_the_evaluation_job_serves_sandboxes(user: Path) -> None:
    """The initial model of fix_line corrects a third of the scripts."""
    python, place = python_of_users(), Path(tempfile.mkdtemp(dir=user))
    run = Run(place / "root" / "fix_line" / "run")
    subprocess.run([python, CONFIGS / "fix_line" / "image.py", "image"], cwd=place, check=True)
    ImageStore(run.root).add("shell", place / "image", temporary=place)
    write_text(run.config, Config.from_toml([CONFIGS / "fix_line.toml"], ["slurm.evaluation.when=after"]).to_toml())
    write_text(run.token, "a-token\n", mode=0o600)
    open_attempt(run, "7_0.0", ["n1"])
    begin_evaluation(run, 0, 1)
    report_outcome(run, 1, "done", "finished", "agent-0")
    environment = {"HPCRL_ATTEMPT": "1", "CUDA_VISIBLE_DEVICES": "", "HPCRL_ADDRESS": "127.0.0.1"}
    packages = f"{ROOT}:{Path(httpx.__file__).parents[1]}"
    environment |= {"PYTHONPATH": packages, "TMPDIR": str(place), "HOME": str(place)}
    command = [python, str(ROOT / "jobs" / "evaluation.py"), str(run.path), "0"]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = read_json(run.eval_summary(0))
    assert summary["eval/all/avg_score"] == pytest.approx(1 / 3)
    assert summary["eval/all/generate/failed_samples"] == 0
    assert not list(place.glob("hpcrl-*")), "it has left something"
