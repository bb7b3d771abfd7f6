"""Several requests for one run: the first that starts is the run, another one goes on with it, and each group is trained once."""

from __future__ import annotations

import json

import pytest

from hpcrl.config.sizes import GPUS
from hpcrl.rundir.ledger import read_attempts, read_outcomes
from tests.faults.history import (
    CURVES,
    assert_ended,
    assert_nothing_lost,
    assert_one_attempt_at_a_time,
    assert_reported_once,
    last_trained,
)
from tests.faults.scenario import Scenario
from tests.faults.test_ranges import NODES, PATIENCE_S, assert_same, reach, wait_for_end

REQUESTS = {"slurm.requests.usual": {"partition": "main"}, "slurm.requests.spot": {"partition": "nograce"}}


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_the_other_request_goes_on_with_the_run(scenario: Scenario) -> None:
    """Both start together, and one yields. The one that has the run is requeued, then all nodes are taken away, and the run comes to its end."""
    run = scenario.submit(REQUESTS, pinned=False)
    scenario.reach(run, 2)
    jobs = set(json.loads(run.submission.read_text())["requests"].values())
    (first,) = read_attempts(run)
    (other,) = jobs - {first.job_id}
    shown = scenario.told("status", run.name)
    assert f"job         {first.job_id} (slurm, running)" in shown, shown
    assert f"{other}, pending: Dependency" in shown, shown
    assert scenario.hpcrl("requeue", run.name).returncode == 0
    scenario.wait(lambda: len(read_attempts(run)) == 2, "another attempt", run=run)
    assert {attempt.job_id for attempt in read_attempts(run)} == jobs
    scenario.reach(run, 5)
    scenario.preempt()
    scenario.wait(lambda: len(read_attempts(run)) == 3, "a third attempt", run=run)
    assert_ended(scenario, run)
    assert_nothing_lost(scenario, run)
    assert_reported_once(run)
    assert_one_attempt_at_a_time(run)
    states = scenario.slurm("squeue", "-h", "-o", "%T", "-j", ",".join(job.partition("_")[0] for job in jobs))
    assert not states.strip(), "the other job was cancelled"


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_all_requests_are_cancelled_with_the_run(scenario: Scenario) -> None:
    run = scenario.submit(REQUESTS, pinned=False)
    scenario.reach(run, 2)
    assert "run: cancelled" in scenario.told("cancel", run.name)
    jobs = json.loads(run.submission.read_text())["requests"].values()
    numbers = ",".join(job.partition("_")[0] for job in jobs)
    scenario.wait(lambda: not scenario.slurm("squeue", "-h", "-j", numbers).strip(), "the queue is empty", 60, run)
    assert scenario.hpcrl("resume", run.name).returncode == 0
    again = json.loads(run.submission.read_text())["requests"].values()
    assert len(again) == 2
    assert not {*again} & {*jobs}
    assert_ended(scenario, run)
    assert_nothing_lost(scenario, run)


@pytest.mark.nodes(5)
@pytest.mark.own_cluster("--gpus", "2xh100:2", "--gpus", "3xa100:1")
@pytest.mark.faults_slow
def test_requests_for_other_gpus_have_nodes_and_layouts_of_their_own(scenario: Scenario) -> None:
    """Two nodes with two GPUs each, or three with one; the other request goes on where one ends.

    Behind these GPUs is no device, so an attempt ends at the checks of its nodes.
    """
    gpus = {"slurm.gpus_per_node": "h100:2", "trainer.placement.policy_num_gpus_per_node": 2}
    requests = {"slurm.requests.new": {}, "slurm.requests.old": {"gpus_per_node": "a100:1"}, "slurm.crash_budget": 2}
    run = scenario.submit({**gpus, **requests, "generator.inference_engine.num_engines": 2}, pinned=False)
    jobs = json.loads(run.submission.read_text())["requests"]
    expected = {
        jobs["new"]: ({}, scenario.nodes[:2], "2 GPU(s) are needed", "'0,1'"),
        jobs["old"]: ({GPUS: 1}, scenario.nodes[2:], "1 GPU(s) are needed", "'0'"),
    }
    scenario.wait(lambda: len(read_outcomes(run)) == 2, "an attempt of each request", run=run)
    attempts = read_attempts(run)
    assert {attempt.job_id for attempt in attempts} == {*expected}, scenario.report(run)
    for attempt, outcome in zip(attempts, read_outcomes(run), strict=True):
        sizes, hosts, needed, devices = expected[attempt.job_id]
        assert (attempt.sizes, attempt.hosts) == (sizes, hosts)
        assert needed in outcome.message
        assert f"CUDA_VISIBLE_DEVICES={devices}" in outcome.message, "those that Slurm gave"
    numbers = ",".join(job.partition("_")[0] for job in jobs.values())
    scenario.wait(lambda: not scenario.slurm("squeue", "-h", "-j", numbers).strip(), "the queue is empty", 60, run)


@pytest.mark.nodes(5)
@pytest.mark.own_cluster("--gpus", "2xh100:2", "--gpus", "3xa100:1")
@pytest.mark.faults_slow
def test_nodes_with_gpus_of_another_type_go_on_with_the_run(scenario: Scenario) -> None:
    """In the layout of the other request. The run asks for the GPUs by sbatch's own option and computes on CPUs, as no device is behind them."""
    requests = {
        "slurm.requests.new": {"nodes": 2, "extra": {"gres": "gpu:h100:2"}},
        "slurm.requests.old": {"nodes": 3, "extra": {"gres": "gpu:a100:1"}},
    }
    # rounding, which other ranks do in another order, grows with the learning rate
    slow = {"trainer.policy.optimizer_config.lr": 1e-4, "slurm.time_minutes": 60}
    run = scenario.submit({**requests, **slow, NODES: "1-2"}, pinned=False)
    jobs = json.loads(run.submission.read_text())["requests"]
    layouts = {jobs["new"]: ({NODES: 1}, scenario.nodes[:2]), jobs["old"]: ({NODES: 2}, scenario.nodes[2:])}
    reach(scenario, run, 3)
    (first,) = read_attempts(run)
    scenario.preempt(50, first.hosts)
    scenario.wait(lambda: len(read_attempts(run)) == 2, "an attempt of the other request", PATIENCE_S, run)
    before = last_trained(run)
    wait_for_end(scenario, run)
    assert_nothing_lost(scenario, run, same_values=False)
    attempts = read_attempts(run)
    assert [attempt.job_id for attempt in attempts] == [first.job_id, *(layouts.keys() - {first.job_id})]
    assert [(attempt.sizes, attempt.hosts) for attempt in attempts] == [layouts[each.job_id] for each in attempts]
    assert 0 < before < last_trained(run), "each has trained"
    assert_one_attempt_at_a_time(run)
    whole = scenario.submit({**slow, "slurm.extra.gres": "gpu:h100:2"}, name="whole", pinned=False)
    wait_for_end(scenario, whole)
    assert_same(run, whole, CURVES)
