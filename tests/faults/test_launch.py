"""From submit to the first process: what can go wrong before a run trains (scenarios 1 to 8 and 39)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcrl.rundir.commit import read_json, write_json
from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import assert_ended, assert_nothing_lost
from tests.faults.scenario import START_S, STEPS, Scenario
from tests.jobs.small_run import HPCRL
from tests.paths import ROOT
from tests.processes import send


@pytest.mark.faults_slow
def test_01_run_directory_that_one_node_does_not_see(scenario: Scenario) -> None:
    """A private directory is mounted over the run's on its second node: the run ends with an error that names the host."""
    run = scenario.submit(setup=["sleep 4"], settings={"slurm.crash_budget": 1})
    scenario.wait(lambda: scenario.queued(run).startswith("RUNNING"), "it starts", 60, run)
    _inside(scenario, scenario.nodes[1], "mount", "-t", "tmpfs", "tmpfs", str(run.path))
    try:
        outcome = scenario.outcome(run, 1, 120)
        assert outcome.kind == "failed"
        assert scenario.nodes[1] in outcome.message
        assert "share" in outcome.message, outcome.message
        assert_ended(scenario, run, "failed")
    finally:
        _inside(scenario, scenario.nodes[1], "umount", str(run.path))


def _inside(scenario: Scenario, node: str, *command: str) -> None:
    """Run a command in the mount namespace of a node."""
    (slurmd,) = scenario.daemons(node)
    subprocess.run(["nsenter", "-t", str(slurmd), "-m", *command], check=True, capture_output=True)


@pytest.mark.faults_slow
@pytest.mark.own_cluster("--conf", "MaxArraySize=4")
def test_02_refused_by_slurm(scenario: Scenario) -> None:
    """A partition, a reservation and an array larger than there are: an exit code, Slurm's reason, and nothing is left."""
    for settings, arguments, reason in (
        ({"slurm.partition": "mian"}, (), "mian"),
        ({"slurm.extra.reservation": "none"}, (), "reservation"),
        ({}, ("--seeds", "0:5"), "array"),
    ):
        done = scenario.try_submit(settings, *arguments)
        assert done.returncode in (2, 3), (settings, done.stdout)
        assert reason in done.stderr
        assert not (scenario.path / "runs").exists(), "left behind"
    assert scenario.slurm("squeue", "-h", "-w", ",".join(scenario.nodes)) == ""


@pytest.mark.faults_slow
def test_03_killed_before_it_could_note_the_job(scenario: Scenario) -> None:
    """sbatch has taken the job, and hpcrl is killed: status finds the job, which finds no work; the name is taken; resume goes on."""
    assert _submit_through(scenario, '/usr/bin/sbatch "$@"; kill -9 $PPID', {"slurm.crash_budget": 1}) != 0
    run = scenario.run_of()
    assert not run.submission.exists()
    assert "found in the queue" in scenario.told("status", "run")
    again = scenario.hpcrl("submit", "run.toml")
    assert again.returncode != 0
    assert "exists" in again.stderr
    scenario.wait(lambda: not scenario.queued(run), "the job ends", 150, run)
    assert "before they began" in scenario.told("status", "run")
    assert "slurm job" in scenario.told("resume", "run")
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_04_starts_before_submit_is_done_and_outlives_the_checkout(scenario: Scenario) -> None:
    """The job starts while submit still waits for sbatch, and the code it was submitted from is broken then: it uses the snapshot."""
    checkout = scenario.path / "checkout"
    for name in ("hpcrl", "jobs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert _submit_through(scenario, '/usr/bin/sbatch "$@"; sleep 4', {}, PYTHONPATH=str(checkout)) == 0
    for path in checkout.rglob("*.py"):
        path.write_text("raise SystemExit('this is not the snapshot')\n")
    run = scenario.run_of()
    assert_nothing_lost(scenario, run)


def _submit_through(scenario: Scenario, sbatch: str, settings: dict[str, Any], **environment: str) -> int:
    """Submit with another sbatch before the real one, and return the exit code."""
    programs = scenario.path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(f"#!/bin/bash\n{sbatch}\n")
    (programs / "sbatch").chmod(0o755)
    scenario.write_experiment("run", settings)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **environment}
    return scenario.cluster.run([HPCRL, "submit", "run.toml"], 120, scenario.path, env).returncode


@pytest.mark.faults_slow
def test_05_packed_on_the_same_nodes(scenario: Scenario) -> None:
    """Three elements of a sweep on one pair of nodes: ports, tokens and logs of their own."""
    packed = {"slurm.exclusive": False, "slurm.array_parallelism": 3, "trainer.max_steps": 4}
    scenario.submit(packed, "--seeds", "0:3")
    runs = [scenario.run_of(f"run.{i}-seed-{i}") for i in range(3)]
    for run in runs:
        assert_nothing_lost(scenario, run, steps=4, same_values=False)
    assert {tuple(read_attempts(run)[0].hosts) for run in runs} == {tuple(scenario.nodes)}
    started = [attempt.started for run in runs for attempt in read_attempts(run)]
    assert max(started) - min(started) < 20, "they were to run at the same time"
    ports = [read_json(run.rendezvous(1)) for run in runs]
    assert len({meeting["port"] for meeting in ports if meeting}) == 3
    assert len({run.token.read_text() for run in runs}) == 3


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_07_another_runs_server_at_the_address(scenario: Scenario) -> None:
    """What a run finds at its controller's address is another run's: refused by token, nothing of that run is touched, and it comes back."""
    longer = 3 * STEPS  # it is there until the other one has found it
    theirs = scenario.submit(
        {"slurm.extra.nodelist": ",".join(scenario.nodes[2:]), "trainer.max_steps": longer}, name="theirs"
    )
    ours = scenario.submit({"slurm.extra.nodelist": ",".join(scenario.nodes[:2])}, name="ours")
    scenario.reach(theirs, 1)
    scenario.reach(ours, 3)
    send([scenario.controller(ours)], signal.SIGSTOP)
    process_status, squatter = (json.loads(run.status_file("controller").read_text()) for run in (ours, theirs))
    process_status["facts"]["url"] = squatter["facts"]["url"]
    write_json(ours.status_file("controller"), process_status)
    scenario.wait(lambda: len(read_attempts(ours)) == 2, "it starts again", START_S, ours)
    assert "refused" in scenario.outcome(ours, 1).message
    assert_nothing_lost(scenario, ours)
    assert_nothing_lost(scenario, theirs, steps=longer)
    assert len(read_attempts(theirs)) == 1


@pytest.mark.faults_slow
def test_08_held_by_slurm(scenario: Scenario) -> None:
    """A job that Slurm requeued in held state: status says so and how to go on; released, it does."""
    run = scenario.submit()
    scenario.reach(run, 3)
    scenario.slurm("scontrol", "requeuehold", scenario.job_of(run))
    scenario.wait(lambda: "PENDING" in scenario.queued(run) or "HOLD" in scenario.queued(run), "it is held", 40, run)
    said = scenario.told("status", "run")
    assert "held" in said, said
    scenario.slurm("scontrol", "release", scenario.job_of(run))
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_39_submitted_from_inside_a_job(scenario: Scenario) -> None:
    """The variables of the job that submits do not leak into the run."""
    scenario.write_experiment("run")
    inside = f"cd {scenario.path} && {HPCRL} submit run.toml"
    options = ["-w", scenario.nodes[0], "-N1", "-n2", "-t2", "-o", f"{scenario.path}/inside.out", "--parsable"]
    outer = scenario.slurm("sbatch", *options, "--export=ALL,MASTER_PORT=1,WORLD_SIZE=7", "--wrap", inside)
    scenario.wait((scenario.path / "runs/faults/run/submission.json").exists, "the inner submit", 60)
    run = scenario.run_of()
    assert scenario.job_of(run).partition("_")[0] != outer
    assert_nothing_lost(scenario, run)
    assert read_attempts(run)[0].hosts == scenario.nodes
    assert "run: slurm job" in Path(f"{scenario.path}/inside.out").read_text()
