"""`hpcrl status` beside a real Slurm: each state that a job can be in, with and without sacct, with slurmctld away."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.runtime.process_status import StatusWriter
from tests.jobs.small_run import HPCRL, wait_for
from tests.launch.manage.slurm_records import trained
from tests.paths import QUICKSTART, ROOT
from tests.slurm.conftest import DevCluster

SITE = str(ROOT / "slurm" / "sites" / "devcluster.toml")
CONFIG = '[trainer]\nresume_mode = "latest"\n[slurm]\ncrash_budget = 3\n'


class Case:
    """A run directory whose job is a shell script."""

    def __init__(self, cluster: DevCluster, root: Path) -> None:
        self.cluster, self.root = cluster, root
        self.run = Run(root / "project" / "mine")
        write_text(self.run.config, CONFIG)
        self.job = ""

    def submit(self, script: str, *options: str) -> None:
        words = ["--parsable", "--array=0", "-o", "/dev/null", "-t", "5", *options, "--wrap", script]
        self.job = self.cluster.ask(["sbatch", *words]) + "_0"
        record = {"executor": "slurm", "job_id": self.job, "overrides": [], "submitted": time.time(), "host": "ctl"}
        write_json(self.run.submission, record)

    def status(self) -> dict[str, Any]:
        done = self.cluster.run([HPCRL, "status", "mine", "--json", "--root", str(self.root)])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0]

    def until(self, word: str, seconds: float = 40) -> dict[str, Any]:
        wait_for(lambda: self.status()["state"] == word, lambda: f"{word} expected, but {self.status()}", seconds)
        return self.status()

    def slurm(self, *command: str) -> None:
        self.cluster.ask(list(command))

    def gone(self) -> None:
        wait_for(lambda: not self.cluster.ask(["squeue", "-h"]), lambda: self.cluster.ask(["squeue"]), 60)


def test_life_of_a_job(cluster: DevCluster, tmp_path: Path) -> None:
    case = Case(cluster, tmp_path)
    block = cluster.ask(["sbatch", "--parsable", "-N4", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 300"])
    wait_for(lambda: cluster.ask(["squeue", "-h", "-t", "R"]), lambda: cluster.ask(["squeue"]), 20)
    case.submit("sleep 300", "-N4", "--exclusive")
    pending = case.until("pending")
    assert pending["detail"].startswith(("Resources: it is the next", "Priority: jobs with")), pending
    wait_for(lambda: "expects it to start at" in case.status()["detail"], lambda: str(case.status()), 20)
    case.slurm("scancel", block)
    case.until("starting")

    open_attempt(case.run, f"{case.job}.0", ["n1"])
    StatusWriter(case.run, "trainer", 1).write("step 3/9", step=3, total=9)
    trained(case.run, 2, 2.0)
    assert case.until("running")["detail"].startswith("step 3/9 · 2.0 s/step · ETA 14 s")
    case.slurm("scontrol", "suspend", case.job)
    assert case.until("suspended")["over"] is False
    case.slurm("scontrol", "resume", case.job)
    case.until("running")

    report_outcome(case.run, 1, "interrupted", "saved and stopped", "agent-0")
    assert case.status()["detail"] == "interrupted: saved and stopped"
    case.slurm("scontrol", "requeue", case.job)
    again = case.until("preempted")
    assert "BeginTime: Slurm lets it wait a while; may start at " in again["detail"]
    case.slurm("scontrol", "hold", case.job)
    held = case.until("held")
    assert f"scontrol release {case.job}" in held["detail"]
    assert "hpcrl cancel mine" in held["advice"]
    done = cluster.run([HPCRL, "cancel", "mine", "--root", str(tmp_path)])
    assert (done.returncode, done.stdout) == (0, "mine: cancelled: cancelled by the user\n")
    assert case.status()["over"] is True
    case.gone()


def test_requeuehold_is_held_and_a_cancelled_job_is_cancelled(cluster: DevCluster, tmp_path: Path) -> None:
    case = Case(cluster, tmp_path)
    case.submit("sleep 300")
    case.until("starting")
    open_attempt(case.run, f"{case.job}.0", ["n1"])
    case.slurm("scontrol", "requeuehold", case.job)
    case.until("held")
    case.slurm("scancel", case.job)
    assert case.until("cancelled")["advice"] == "hpcrl resume mine continues it"
    case.gone()


def test_forgotten_job_with_accounting(accounting: DevCluster, tmp_path: Path) -> None:
    case = Case(accounting, tmp_path)
    case.submit("exit 3")
    wait_for(lambda: accounting.run(["scontrol", "show", "job", case.job]).returncode != 0, lambda: "forgotten", 60)
    lost = case.status()
    assert (lost["state"], lost["over"]) == ("lost", True)
    assert "its job ended as FAILED in Slurm" in lost["detail"]
    accounting.stop("slurmdbd")
    try:
        assert "Slurm no longer knows its job" in case.status()["detail"]
    finally:
        accounting.start("slurmdbd")


@pytest.mark.faults_slow
def test_slurmctld_that_is_away(accounting: DevCluster, tmp_path: Path) -> None:
    case = Case(accounting, tmp_path)
    case.submit("sleep 300")
    case.until("starting")
    open_attempt(case.run, f"{case.job}.0", ["n1"])
    StatusWriter(case.run, "trainer", 1).write("step 2/9", step=2, total=9)
    case.until("running")
    accounting.stop("slurmctld")
    try:
        began = time.monotonic()
        blind = case.status()
        assert time.monotonic() - began < 30
        assert (blind["state"], blind["over"]) == ("running", False)
        assert "step 2/9" in blind["detail"]
        # it gives up after ten seconds, and so does who asks it
        assert re.search("Unable to contact slurm controller|squeue: no answer in 10 s", blind["detail"])
    finally:
        accounting.start("slurmctld")
    case.until("running")
    done = accounting.run([HPCRL, "cancel", "mine", "--now", "--root", str(tmp_path)])
    assert done.stdout == "mine: cancelled: cancelled by the user\n"
    case.gone()


@pytest.mark.faults_slow
def test_submission_waits_for_slurmctld(accounting: DevCluster, tmp_path: Path) -> None:
    submit = [
        HPCRL,
        "submit",
        str(QUICKSTART),
        SITE,
        "trainer.run_name=late",
        "generator.inference_engine.num_engines=7",
    ]
    accounting.stop("slurmctld")
    try:
        argv, pipe = accounting.argv("run", *submit), subprocess.PIPE
        with subprocess.Popen(argv, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stderr
            assert "Unable to contact slurm controller" in process.stderr.readline()
            accounting.start("slurmctld")
            said, _ = process.communicate(timeout=90)
    finally:
        if accounting.run(["scontrol", "ping"]).returncode != 0:
            accounting.start("slurmctld")
    assert "late: slurm job" in said
    assert len(accounting.ask(["squeue", "-h", "-r", "--name=hpcrl-late"]).splitlines()) == 1
    assert "cancelled" in accounting.run([HPCRL, "cancel", "late"], cwd=tmp_path).stdout
    assert accounting.ask(["squeue", "-h", "--name=hpcrl-late"]) == ""


def test_job_whose_submission_was_cut_short(cluster: DevCluster, tmp_path: Path) -> None:
    submit = [str(QUICKSTART), SITE, "trainer.run_name=cut", "generator.inference_engine.num_engines=7"]
    assert cluster.run([HPCRL, "submit", *submit, "--seeds", "0:2"], cwd=tmp_path).returncode == 0
    run = Run(tmp_path / "runs" / "quickstart" / "cut.1-seed-1")
    job = json.loads(run.submission.read_text())["job_id"]
    run.submission.unlink()
    refused = cluster.run([HPCRL, "resume", "cut.1"], cwd=tmp_path)
    assert refused.returncode == 5
    assert "is pending; there is nothing to resume" in refused.stderr
    run.submission.unlink()
    status = cluster.run([HPCRL, "status", "cut.1"], cwd=tmp_path).stdout
    assert f"job         {job} (slurm, pending, found in the queue: its submission was cut short)" in status
    assert "fewer nodes" in status or "never has the nodes" in status
    for name in ("cut.0", "cut.1"):
        assert "cancelled" in cluster.run([HPCRL, "cancel", name], cwd=tmp_path).stdout
    assert cluster.ask(["squeue", "-h"]) == ""
