"""A run on a real Slurm whose jobs have another interpreter than the process that submits it: a script that notes its calls and becomes that of the tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of
from tests.jobs.small_run import HPCRL, SMALL, logs_of, wait_for
from tests.paths import QUICKSTART
from tests.slurm.conftest import DevCluster
from tests.slurm.test_runs import SITE


def prepare(tmp_path: Path) -> tuple[Path, list[str]]:
    """Return the file of the calls, and the settings of the jobs."""
    python, calls = tmp_path / "fat" / "python", tmp_path / "calls"
    text = f'#!/bin/sh\necho "$OF_SETUP $*" >> {calls}\nexec {sys.executable} "$@"\n'
    write_text(python, text, mode=0o755)
    return calls, [f"slurm.python={python}", 'slurm.setup=["export OF_SETUP=loaded HF_HUB_OFFLINE=1"]']


def test_doctor_looks_at_the_interpreter_of_the_jobs(cluster: DevCluster, tmp_path: Path) -> None:
    calls, settings = prepare(tmp_path)
    done = cluster.run([HPCRL, "doctor", SITE, "--root", str(tmp_path), "--json", *settings])
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert f"{sys.prefix} of the jobs on n" in found["environment"]["found"]
    assert calls.read_text().startswith("loaded -m hpcrl.launch.doctor.node ")
    settings[0] = f"slurm.python={tmp_path}/missing"
    done = cluster.run([HPCRL, "doctor", SITE, "--root", str(tmp_path), "--json", *settings])
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert f"{tmp_path}/missing" in found["compute node"]["found"]


@pytest.mark.faults_slow
def test_a_run_and_the_end_of_its_batch_script_have_it(cluster: DevCluster, tmp_path: Path) -> None:
    calls, settings = prepare(tmp_path)
    steps = [*SMALL, "trainer.max_steps=1", "trainer.eval_interval=0", "trainer.run_name=mine"]
    done = cluster.run([HPCRL, "submit", str(QUICKSTART), SITE, *steps, *settings], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "runs" / "quickstart" / "mine")
    wait_for(lambda: outcome_of(run, 1), lambda: logs_of(run), 300)
    wait_for(lambda: not cluster.ask(["squeue", "-h"]), lambda: cluster.ask(["squeue"]), 60)
    outcome = outcome_of(run, 1)
    assert outcome is not None
    assert outcome.kind == "done", logs_of(run)
    assert "loaded -u -m submitit.core._submit " in calls.read_text()
    assert calls.read_text().count("loaded -m hpcrl.launch.requeue.epilogue ") == 1
