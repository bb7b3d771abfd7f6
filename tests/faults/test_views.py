"""What people are told, whatever Slurm can tell (scenarios 34 to 36)."""

from __future__ import annotations

import time

import pytest

from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import assert_nothing_lost
from tests.faults.processes import send
from tests.faults.stage import Stage
from tests.faults.test_preemption import TERM


@pytest.mark.faults_slow
@pytest.mark.own_cluster("--accounting")
def test_34_three_preemptions_with_accounting(stage: Stage) -> None:
    """On a cluster with sacct: three preemptions, one curve, the same words."""
    run = stage.submit({"trainer.max_steps": 20, "trainer.ckpt_interval": 100})
    for attempt, step in ((1, 3), (2, 7), (3, 11)):
        stage.reach(run, step)
        stage.preempt()
        assert stage.outcome(run, attempt, 40).kind == "interrupted"
    assert_nothing_lost(stage, run, steps=20)
    assert len(read_attempts(run)) == 4
    assert "run: done" in stage.told("status", "run")


@pytest.mark.faults_slow
@pytest.mark.own_cluster("--conf", "SlurmctldTimeout=30")
def test_35_slurmctld_is_away_for_two_minutes(stage: Stage) -> None:
    """Status says what it knows, submit is refused, and the run that wanted to requeue itself does so when it can."""
    run = stage.submit()
    stage.reach(run, 3)
    stage.cluster.stop("slurmctld")
    began = time.monotonic()
    try:
        send(stage.agents(run), TERM)
        assert stage.outcome(run, 1, 40).kind == "interrupted"
        said = stage.told("status", "run")
        assert "lost" not in said, said
        assert "interrupted" in said or "saved" in said, said
        refused = stage.try_submit(name="second")
        assert refused.returncode == 3
        assert not stage.run_of("second").path.exists()
        time.sleep(max(0.0, 120 - (time.monotonic() - began)))
    finally:
        stage.cluster.start("slurmctld")
    assert_nothing_lost(stage, run)
    assert len(read_attempts(run)) == 2


@pytest.mark.own_cluster("--conf", "MinJobAge=2")
def test_36_slurm_has_forgotten_the_job(stage: Stage) -> None:
    """No squeue, no sacct: the word comes from the run's own files."""
    run = stage.submit({"trainer.max_steps": 4})
    assert_nothing_lost(stage, run, steps=4)
    job = stage.job_of(run)
    stage.wait(lambda: stage.cluster.run(["scontrol", "show", "job", job]).returncode != 0, "Slurm forgets it", 90, run)
    assert "run: done" in stage.told("status", "run")
