"""A run that gets more nodes while it runs, or gives its own other roles, and one that loses a node and goes on with the others."""

from __future__ import annotations

import json

import pytest

from hpcrl.rundir.growth import read_growth
from hpcrl.rundir.ledger import outcome_of, read_attempts
from tests.faults.history import (
    assert_groups_once,
    assert_nothing_lost,
    assert_one_attempt_at_a_time,
    assert_reported_once,
    last_trained,
)
from tests.faults.scenario import Scenario
from tests.faults.test_ranges import NODES, PATIENCE_S, drained, reach


@pytest.mark.nodes(3)
@pytest.mark.own_cluster("--conf", "MinJobAge=300")  # nobody else waits for nodes
@pytest.mark.faults_slow
def test_a_run_goes_on_with_more_nodes_once_they_are_idle(scenario: Scenario) -> None:
    """The third node comes back while the run is on two; the run saves, gives them back and has all three."""
    scenario.knobs(latency_s=2.0)
    long = {"trainer.max_steps": 9000, "trainer.epochs": 100, "slurm.time_minutes": 600, "slurm.grow_minutes": 60}
    with drained(scenario, scenario.nodes[2:]):
        run = scenario.submit({NODES: "1-2", **long}, pinned=False)
        reach(scenario, run, 9)
    scenario.wait(lambda: len(read_attempts(run)) == 2, "growth", PATIENCE_S, run)
    first, second = read_attempts(run)
    assert (len(first.hosts), len(second.hosts)) == (2, 3), scenario.report(run)
    outcome, growth = outcome_of(run, 1), read_growth(run)
    assert outcome
    assert growth
    assert outcome.kind == "interrupted"
    assert "to go on with 3 nodes" in outcome.message
    assert (growth.attempt, growth.nodes, growth.job) == (1, 3, first.job_id)
    reach(scenario, run, last_trained(run) + 3)
    assert "run: cancelled" in scenario.told("cancel", run.name)
    assert len(read_attempts(run)) == 2, "not twice within the hour"
    assert_groups_once(run)
    assert_reported_once(run)


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_a_trainer_that_waits_gives_a_node_to_generation(scenario: Scenario) -> None:
    """In the same start of the job: two nodes train and one generates slowly, then one trains and two generate."""
    scenario.knobs(latency_s=2.0)
    long = {"trainer.max_steps": 9000, "trainer.epochs": 100, "slurm.time_minutes": 600, "slurm.grow_minutes": 60}
    run = scenario.submit({"slurm.nodes": 3, **long}, pinned=False)
    scenario.wait(lambda: len(read_attempts(run)) == 2, "other roles", PATIENCE_S, run)
    first, second = read_attempts(run)
    assert [[*one.sizes.values()] for one in (first, second)] == [[2, 1], [1, 2]], scenario.report(run)
    assert (second.job, second.hosts) == (f"{first.job}+1", first.hosts), "without the queue"
    outcome, growth = outcome_of(run, 1), read_growth(run)
    assert outcome
    assert growth
    assert outcome.kind == "interrupted"
    assert "to go on with policy_num_nodes 1, num_engines 2, " in outcome.message
    assert (growth.attempt, growth.nodes, growth.job) == (1, 3, first.job_id)
    scenario.knobs()
    reach(scenario, run, last_trained(run) + 3)
    for command in ("status", "goodput"):
        assert "policy_num_nodes 1, num_engines 2; the trainer waited" in scenario.told(command, run.name)
    assert "run: cancelled" in scenario.told("cancel", run.name)
    assert len(read_attempts(run)) == 2, "not twice within the hour"
    assert_groups_once(run)
    assert_reported_once(run)


@pytest.mark.nodes(5)
@pytest.mark.faults_slow
def test_a_larger_request_takes_the_run_over(scenario: Scenario) -> None:
    """It waits for nodes while the smaller one runs; once it has them that one saves, goes back into the queue and waits for it."""
    scenario.knobs(latency_s=1.0)
    settings = {
        "slurm.requests.small": {"nodes": 2},
        "slurm.requests.large": {"nodes": 3},
        "slurm.grow_minutes": 60,
        "trainer.max_steps": 9000,
        "trainer.epochs": 100,
        "slurm.time_minutes": 600,
    }
    with drained(scenario, scenario.nodes[2:]):
        run = scenario.submit({NODES: "1-2", **settings}, pinned=False)
        reach(scenario, run, 9)
    jobs = json.loads(run.submission.read_text())["requests"]
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the larger request", PATIENCE_S, run)
    first, second = read_attempts(run)
    assert [one.job_id for one in (first, second)] == [jobs["small"], jobs["large"]], scenario.report(run)
    assert (len(first.hosts), len(second.hosts)) == (2, 3)
    outcome, growth = outcome_of(run, 1), read_growth(run)
    assert outcome
    assert growth
    assert (outcome.kind, growth.attempt, growth.nodes, growth.job) == ("interrupted", 1, 3, jobs["large"])
    assert f"job {jobs['large']} has started on 3 nodes" in outcome.message
    reach(scenario, run, last_trained(run) + 3)
    assert f"{jobs['small']}, pending: Dependency" in scenario.told("status", run.name)
    assert scenario.hpcrl("requeue", run.name).returncode == 0
    scenario.wait(lambda: len(read_attempts(run)) == 3, "either request", PATIENCE_S, run)
    reach(scenario, run, last_trained(run) + 2)
    assert "run: cancelled" in scenario.told("cancel", run.name)
    assert_groups_once(run)
    assert_reported_once(run)
    assert_one_attempt_at_a_time(run)


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_a_lost_node_leaves_the_others_to_the_next_attempt(scenario: Scenario) -> None:
    """In the same start of the job: Slurm takes the second trainer's node out of it, and the batch script starts the agents again."""
    run = scenario.submit({NODES: "1-2", "slurm.requests.only": {}, "trainer.max_steps": 30}, pinned=False)
    scenario.knobs(latency_s=1.0)
    reach(scenario, run, 4)
    (first,) = read_attempts(run)
    lost = first.hosts[1]
    scenario.cluster.stop(lost)
    try:
        scenario.wait(lambda: len(read_attempts(run)) == 2, "another attempt", PATIENCE_S, run)
        scenario.knobs()
        second = read_attempts(run)[1]
        assert second.job == f"{first.job}+1", scenario.report(run)
        assert second.hosts == [host for host in first.hosts if host != lost]
        assert scenario.slurm("squeue", "-h", "-r", "-j", first.job_id, "-o", "%T %D") == "RUNNING 2"
        assert_nothing_lost(scenario, run, steps=30, same_values=False)
    finally:
        scenario.cluster.start(lost)
    assert len(read_attempts(run)) == 2
    assert len([*run.allocations.glob("*.json")]) == 2
