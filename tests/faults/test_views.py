"""What people are told, whatever Slurm can tell (scenarios 34 to 36)."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from hpcrl.observe.goodput import account_of
from hpcrl.rundir.allocations import read_allocations
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from tests.faults.history import assert_nothing_lost
from tests.faults.scenario import Scenario
from tests.faults.test_preemption import TERM
from tests.processes import send


@pytest.mark.faults_slow
@pytest.mark.own_cluster("--accounting")
def test_34_three_preemptions_with_accounting(scenario: Scenario) -> None:
    """On a cluster with sacct: three preemptions, one curve, the same words."""
    run = scenario.submit({"trainer.max_steps": 20, "trainer.ckpt_interval": 100})
    for attempt, step in ((1, 3), (2, 7), (3, 11)):
        scenario.reach(run, step)
        scenario.preempt()
        assert scenario.outcome(run, attempt, 40).kind == "interrupted"
    assert_nothing_lost(scenario, run, steps=20)
    assert len(read_attempts(run)) == 4
    assert "run: done" in scenario.told("status", "run")
    assert_agrees_with_sacct(scenario, run)


def assert_agrees_with_sacct(scenario: Scenario, run: Run) -> None:
    """Compare the account with Slurm's, start by start: both round to seconds. slurmdbd may lack when a requeued job started again."""
    record, account, held = read_json(run.submission), account_of(run), read_allocations(run)
    assert record
    assert account
    columns = ["sacct", "-nXPD", "-o", "Submit,Start,End,NNodes", "-j", record["job_id"]]
    shown = [line.split("|") for line in scenario.cluster.ask(columns).splitlines()]
    assert len(shown) == len(held) == 4
    known = [(one, start) for one, start in zip(held, shown, strict=True) if start[1] != "None"]
    assert len(known) >= 2
    slurms = [[datetime.fromisoformat(time).timestamp() for time in start[:3]] for _, start in known]
    seconds = sum(end - start for _, start, end in slurms), sum(one.until - one.start for one, _ in known)
    print(f"{len(known)} starts: {seconds[0]:.0f} s by sacct, {seconds[1]:.1f} s here")
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01, abs=2.0 * len(known))
    for (one, start), (submitted, began, ended) in zip(known, slurms, strict=True):
        assert (one.start, one.until) == pytest.approx((began, ended), abs=2.0)
        assert one.queued == pytest.approx(submitted, abs=2.0)
        assert len(one.nodes) == int(start[3])
    assert account.total == pytest.approx(sum(len(one.nodes) * (one.until - one.start) for one in held))
    assert f"goodput {account.goodput:.1%}" in scenario.told("goodput", "run")


@pytest.mark.faults_slow
@pytest.mark.own_cluster("--conf", "SlurmctldTimeout=30")
def test_35_slurmctld_is_away_for_two_minutes(scenario: Scenario) -> None:
    """Status says what it knows, submit is refused, and the run that wanted to requeue itself does so when it can."""
    run = scenario.submit()
    scenario.reach(run, 3)
    scenario.cluster.stop("slurmctld")
    began = time.monotonic()
    try:
        send(scenario.agents(run), TERM)
        assert scenario.outcome(run, 1, 40).kind == "interrupted"
        said = scenario.told("status", "run")
        assert "lost" not in said, said
        assert "interrupted" in said or "saved" in said, said
        refused = scenario.try_submit(name="second")
        assert refused.returncode == 3
        assert not scenario.run_of("second").path.exists()
        time.sleep(max(0.0, 120 - (time.monotonic() - began)))
    finally:
        scenario.cluster.start("slurmctld")
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 2


@pytest.mark.faults_slow
@pytest.mark.own_cluster("--conf", "MinJobAge=2")
def test_36_slurm_has_forgotten_the_job(scenario: Scenario) -> None:
    """No squeue, no sacct: the word comes from the run's own files."""
    run = scenario.submit({"trainer.max_steps": 4})
    assert_nothing_lost(scenario, run, steps=4)
    scenario.wait_until_forgotten(run)
    assert "run: done" in scenario.told("status", "run")
