"""Resumes by a person, doubled starts, and sites that lack something (scenarios 32, 33, 38 and 40)."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGTERM

import pytest

from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import assert_ended, assert_nothing_lost
from tests.faults.scenario import START_S, Scenario
from tests.processes import send


@pytest.mark.faults_slow
def test_32_started_twice(scenario: Scenario) -> None:
    """What runs cannot be submitted or resumed once more."""
    run = scenario.submit()
    scenario.reach(run, 2)
    for arguments in (("submit", "run.toml"), ("resume", "run")):
        done = scenario.hpcrl(*arguments)
        assert done.returncode != 0
        assert "run" in done.stderr
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_32_batch_script_submitted_by_hand(scenario: Scenario) -> None:
    """Somebody gives the batch script of a running run to sbatch: that job leaves the run alone."""
    run = scenario.submit(pinned=False)
    scenario.knobs(latency_s=0.5)
    scenario.reach(run, 3)
    (script,) = run.slurm.resolve().glob("*/*_submission.sh")
    second = scenario.slurm("sbatch", "--parsable", str(script))
    scenario.wait(lambda: not scenario.queued(run), "the first job ends", 240, run)
    scenario.wait(lambda: not scenario.slurm("squeue", "-h", "-j", second), "the second job ends", 240, run)
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_33_resumed_with_other_settings(scenario: Scenario) -> None:
    """On two ranks and two replicas, with another learning rate: told, and done. Another seed or other data: refused."""
    run = scenario.submit({"trainer.max_steps": 500}, pinned=False)
    scenario.reach(run, 4)
    assert "run: cancelled" in scenario.told("cancel", "run")
    for setting in ("trainer.seed=3", "trainer.train_batch_size=8"):
        refused = scenario.hpcrl("resume", "run", setting)
        assert refused.returncode == 2, refused.stdout
        assert setting.partition("=")[0] in refused.stderr
    resumed = scenario.told(
        "resume",
        "run",
        "trainer.placement.policy_num_nodes=2",
        "generator.inference_engine.num_engines=2",
        "trainer.policy.optimizer_config.lr=5e-4",
        "trainer.max_steps=12",
    )
    assert "trainer.policy.optimizer_config.lr: 0.001 -> 0.0005" in resumed
    scenario.outcome(run, 2)
    assert_nothing_lost(scenario, run, same_values=False)
    assert len(read_attempts(run)[1].hosts) == 4


@pytest.mark.faults_slow
def test_38_a_flood_of_output_and_few_open_files(scenario: Scenario) -> None:
    """The engine writes 200 MB to its log, and no process may open more than 1024 files."""
    scenario.knobs(flood_mb=4)
    run = scenario.submit(setup=["ulimit -n 1024"])
    assert_nothing_lost(scenario, run)
    assert run.log(1, "engine-0").stat().st_size > 150 << 20
    assert len(scenario.told("logs", "run", "--role", "trainer")) < 1 << 20


def _programs(scenario: Scenario, without: str) -> Path:
    """Return a folder with all programs of the machine but one."""
    folder = scenario.path / "bin"
    folder.mkdir()
    for place in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        for path in Path(place).iterdir():
            if path.name != without and not (folder / path.name).is_symlink():
                (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.faults_slow
def test_40_no_scontrol_on_compute_nodes(scenario: Scenario) -> None:
    """The run cannot requeue itself: it saves and ends, status says so, and resume from the login node goes on."""
    run = scenario.submit(setup=[f"export PATH='{_programs(scenario, 'scontrol')}'"])
    scenario.reach(run, 3)
    send(scenario.agents(run), SIGTERM)
    assert scenario.outcome(run, 1, 40).kind == "interrupted"
    assert_ended(scenario, run, "interrupted")
    assert "slurm job" in scenario.told("resume", "run")
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_40_may_not_change_its_own_start(scenario: Scenario) -> None:
    """A site that lets no user update a job: the run waits as long as Slurm lets it, and comes back all the same."""
    folder = _programs(scenario, "scontrol")
    refusing = 'if [ "$1" = update ]; then echo "Access/permission denied" >&2; exit 1; fi; exec /usr/bin/scontrol "$@"'
    (folder / "scontrol").write_text(f"#!/bin/sh\n{refusing}\n")
    os.chmod(folder / "scontrol", 0o755)
    run = scenario.submit(setup=[f"export PATH='{folder}'"])
    scenario.reach(run, 3)
    send(scenario.agents(run), SIGTERM)
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    assert_nothing_lost(scenario, run)
