"""Runs with job arrays beside their own: an elastic pool (scenario 37), an evaluation job (54); how a pool's elements are preempted one by one stands in tests/slurm/test_pool.py."""

from __future__ import annotations

import json
import re
from signal import SIGKILL
from typing import Any

import pytest

from hpcrl.data.batch_file import batch_steps
from hpcrl.data.rollouts import evaluated_samples
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of, read_attempts
from hpcrl.runtime.process_status import read_process_statuses
from tests.faults.history import assert_nothing_lost
from tests.faults.scenario import START_S, Scenario, write_rows
from tests.jobs.small_run import curve
from tests.processes import parent_of, send, variable


def elastic(scenario: Scenario, **settings: Any) -> dict[str, Any]:
    """Return the settings of a run on the first node, whose replicas, on the others, are all elastic."""
    return {
        "slurm.extra.nodelist": scenario.nodes[0],
        "generator.inference_engine.num_engines": 0,
        "slurm.elastic.replicas": 2,
        "slurm.elastic.cpus_per_task": 1,
        "slurm.elastic.extra": {"exclude": ",".join([scenario.nodes[0], *scenario.others]), "exclusive": True},
        **settings,
    }


def pool_of(run: Run) -> str:
    """Return the id of a run's only pool."""
    record = json.loads(run.submission.read_text())
    (pool,) = filter(None, [record["pool"], *record["scorer_pools"].values()])
    return pool


def elements(scenario: Scenario, run: Run) -> list[str]:
    """Return the states of the elements that are in the queue."""
    return states_of_array(scenario, pool_of(run))


def states_of_array(scenario: Scenario, array: str) -> list[str]:
    """Return the states of those elements of a job array that are in the queue."""
    states = scenario.cluster.run(["squeue", "-h", "-r", "-j", array, "-o", "%T"]).stdout.split()
    return [state for state in states if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")]


def served(scenario: Scenario, run: Run, attempt: int) -> None:
    """Wait for a replica of an attempt. What it does is not asked: it may have done it all between two looks."""

    def there() -> bool:
        return any(status.process.startswith("rollout-") for status in read_process_statuses(run, attempt))

    scenario.wait(there, f"attempt {attempt} is served", START_S, run)


@pytest.mark.nodes(2)
@pytest.mark.faults_slow
def test_37_the_run_ends_before_its_pool(scenario: Scenario) -> None:
    """One element works, the other waits for its turn (%1): neither is left when the run has ended."""
    scenario.knobs(latency_s=1.0)
    run = scenario.submit(elastic(scenario, **{"slurm.elastic.at_once": 1}))
    scenario.reach(run, 1)
    assert sorted(elements(scenario, run)) == ["PENDING", "RUNNING"]
    assert_nothing_lost(scenario, run)
    scenario.wait(lambda: not elements(scenario, run), "the pool has left the queue", 30, run)


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_37_the_run_is_preempted_and_its_pool_is_not(scenario: Scenario) -> None:
    """The elements wait where they are, and serve the next attempt."""
    run = scenario.submit(elastic(scenario))
    scenario.knobs(latency_s=0.5)
    scenario.reach(run, 3)
    scenario.preempt(nodes=scenario.nodes[:1])
    assert scenario.outcome(run, 1).kind == "interrupted"
    served(scenario, run, 2)
    scenario.knobs()
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 2
    assert outcome_of(run, 2)
    pool = pool_of(run)
    assert "Restarts=0" in scenario.slurm("scontrol", "show", "job", "-o", f"{pool}_0")
    scenario.wait(lambda: not elements(scenario, run), "the pool has left the queue", 30, run)


@pytest.mark.nodes(2)
@pytest.mark.faults_slow
@pytest.mark.parametrize("victim", ["agent", "batch shell"])
def test_37_an_element_is_killed(scenario: Scenario, victim: str) -> None:
    """The run has no other replica: it goes on when Slurm has started the element again, which nobody asks it to."""
    scenario.knobs(latency_s=0.5)
    run = scenario.submit(elastic(scenario, **{"slurm.elastic.replicas": 1}))
    scenario.reach(run, 2)
    pool = pool_of(run)
    agent = next(pid for pid in scenario.agents(run) if variable(pid, "SLURM_ARRAY_JOB_ID") == pool)
    sruns = [pid for pid in scenario.sruns(run) if variable(pid, "SLURM_ARRAY_JOB_ID") == pool]
    shell = ({parent_of(pid) for pid in sruns} - set(sruns)).pop()
    send([agent if victim == "agent" else shell], SIGKILL)
    scenario.knobs()
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1
    assert "Restarts=1" in scenario.slurm("scontrol", "show", "job", "-o", f"{pool}_0")


@pytest.mark.nodes(4)
@pytest.mark.faults_slow
def test_37_a_scorer_of_a_pool_is_killed(scenario: Scenario) -> None:
    """Both copies of the reference are elements of a pool. The agent of one is killed: the other one has its groups, and Slurm starts it again. Losses
    are those of a run whose reference is beside the policy, and to which nothing happens."""
    gang, section = scenario.nodes[:2], "slurm.elastic_scorers.reference"
    elsewhere = {"exclude": ",".join([*gang, *scenario.others]), "exclusive": True}
    scenario.knobs(latency_s=0.5)
    run = scenario.submit(
        {
            "slurm.extra.nodelist": ",".join(gang),
            "trainer.placement.colocate_policy_ref": False,
            "trainer.placement.ref_num_nodes": 0,
            f"{section}.replicas": 2,
            f"{section}.cpus_per_task": 1,
            f"{section}.extra": elsewhere,
        }
    )
    pool = pool_of(run)

    def scoring() -> list[str]:
        states = {one.process: one.state for one in read_process_statuses(run, 1)}
        return sorted(name for name, state in states.items() if name.startswith("scorer-") and state == "ready")

    scenario.wait(lambda: scoring() == ["scorer-0", "scorer-1"], "both score", START_S, run)
    step = max(batch_steps(run), default=0)
    agents = [pid for pid in scenario.agents(run) if variable(pid, "SLURM_ARRAY_JOB_ID") == pool]
    send([next(pid for pid in agents if variable(pid, "SLURM_ARRAY_TASK_ID") == "1")], SIGKILL)

    def queued_again() -> bool:
        return "Restarts=1" in scenario.slurm("scontrol", "show", "job", "-o", f"{pool}_1")

    scenario.wait(queued_again, "Slurm queues the element again", 60, run)
    scenario.reach(run, step + 2)
    assert "scorer-0" in scenario.told("status", str(run.path))
    scenario.knobs()
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1
    assert set(curve(run, "scorers/total").values()) == {2}
    assert "starting scorer-1" in scenario.told("logs", str(run.path), "--role", "agent")
    scenario.wait(lambda: not elements(scenario, run), "the pool has left the queue", 30, run)


EVALUATED = 40


def evaluated(run: Run, version: int) -> list[str]:
    """Return the names of the samples of a version that are on disk."""
    there = run.evals_of(version).glob("*.jsonl")
    return [one.name for one in evaluated_samples(run, version)[1]] if any(there) else []


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
@pytest.mark.parametrize("when", ["during", "after"])
def test_54_a_run_is_preempted_and_then_its_evaluation_job(scenario: Scenario, when: str) -> None:
    """Version 6 comes from the second attempt, which is done before its score. What was evaluated of it is not generated again."""
    gang, validation = scenario.nodes[:2], scenario.path / "validation.jsonl"
    write_rows(validation, EVALUATED)
    run = scenario.submit(
        {
            "data.val_data": [str(validation)],
            "trainer.eval_interval": 3,
            "trainer.eval_before_train": False,
            "trainer.max_steps": 6,
            "generator.inference_engine.max_num_seqs": 4,
            "slurm.extra.nodelist": ",".join(gang),
            "slurm.evaluation.when": when,
            "slurm.evaluation.again_minutes": 1,
            "slurm.evaluation.cpus_per_task": 1,
            "slurm.evaluation.extra": {"exclude": ",".join([*gang, *scenario.others]), "exclusive": True},
        }
    )
    job = json.loads(run.submission.read_text())["evaluation"]
    scenario.knobs(latency_s=1.0)
    scenario.reach(run, 4)
    scenario.preempt(nodes=gang)
    scenario.wait(lambda: len(evaluated(run, 6)) >= EVALUATED // 2, "rows that are finished", 6 * START_S, run)
    scenario.knobs(latency_s=600)  # no more of them are
    assert scenario.outcome(run, 2, 2 * START_S).kind == "done"
    assert f"v6: for job {job}" in scenario.told("status", str(run.path))
    starts = restarts(scenario, job)
    scenario.preempt(nodes=scenario.nodes[2:])
    scenario.wait(lambda: restarts(scenario, job) > starts, "Slurm queues the element again", 90, run)
    scenario.knobs(latency_s=0.5)
    scenario.wait(lambda: not begun_evaluations(run), "all versions are evaluated", 3 * START_S, run)
    summaries = [read_json(run.eval_summary(version)) for version in (3, 6)]
    assert summaries[0]
    assert summaries[0] == summaries[1], "tokens depend on prompt and seed alone"
    assert sorted(curve(run, "eval/all/avg_score")) == [3, 6]
    for version in (3, 6):
        assert evaluated(run, version) == [f"e{version:06d}-{row:08d}.0" for row in range(EVALUATED)]
    log = "".join(path.read_text() for path in run.path.glob("logs/*/evaluation-0.log"))
    kept = re.findall(rf"version 6: (\d+) of {EVALUATED} rows were evaluated before", log)
    assert int(kept[0]) >= EVALUATED // 2
    scenario.wait(lambda: not states_of_array(scenario, job), "the job has left the queue", 180, run)
    assert_nothing_lost(scenario, run, steps=6)


def restarts(scenario: Scenario, job: str) -> int:
    shown = scenario.slurm("scontrol", "show", "job", "-o", f"{job}_0")
    return int(re.findall(r"\bRestarts=(\d+)", shown)[0])
