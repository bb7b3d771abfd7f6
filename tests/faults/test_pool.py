"""Runs with an elastic pool (scenario 37); how its elements are preempted one by one stands in tests/slurm/test_pool.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of, read_attempts
from hpcrl.runtime.process_status import read_process_statuses
from tests.faults.history import assert_nothing_lost
from tests.faults.stage import START_S, Stage


def elastic(stage: Stage, **settings: Any) -> dict[str, Any]:
    """Return the settings of a run on the first node, whose replicas, on the others, are all elastic."""
    return {
        "slurm.extra.nodelist": stage.nodes[0],
        "generator.inference_engine.num_engines": 0,
        "slurm.elastic.replicas": 2,
        "slurm.elastic.cpus_per_task": 1,
        "slurm.elastic.extra": {"exclude": ",".join([stage.nodes[0], *stage.others]), "exclusive": True},
        **settings,
    }


def elements(stage: Stage, run: Run) -> list[str]:
    """Return the states of the elements that are in the queue."""
    pool = json.loads(run.submission.read_text())["pool"]
    states = stage.cluster.run(["squeue", "-h", "-r", "-j", pool, "-o", "%T"]).stdout.split()
    return [state for state in states if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")]


def served(stage: Stage, run: Run, attempt: int) -> None:
    def serving() -> bool:
        process_statuses = [
            process_status
            for process_status in read_process_statuses(run, attempt)
            if process_status.process.startswith("rollout-")
        ]
        return any(process_status.state.startswith("generating") for process_status in process_statuses)

    stage.wait(serving, f"attempt {attempt} is served", START_S, run)


@pytest.mark.nodes(2)
def test_37_the_run_ends_before_its_pool(stage: Stage) -> None:
    """One element works, the other waits for its turn (%1): neither is left when the run has ended."""
    stage.knobs(latency_s=1.0)
    run = stage.submit(elastic(stage, **{"slurm.elastic.at_once": 1}))
    stage.reach(run, 1)
    assert sorted(elements(stage, run)) == ["PENDING", "RUNNING"]
    assert_nothing_lost(stage, run)
    stage.wait(lambda: not elements(stage, run), "the pool has left the queue", 30, run)


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_37_the_run_is_preempted_and_its_pool_is_not(stage: Stage) -> None:
    """The elements wait where they are, and serve the next attempt."""
    run = stage.submit(elastic(stage))
    stage.knobs(latency_s=0.5)
    stage.reach(run, 3)
    stage.preempt(nodes=stage.nodes[:1])
    assert stage.outcome(run, 1).kind == "interrupted"
    served(stage, run, 2)
    stage.knobs()
    assert_nothing_lost(stage, run)
    assert len(read_attempts(run)) == 2
    assert outcome_of(run, 2)
    pool = json.loads(run.submission.read_text())["pool"]
    assert "Restarts=0" in stage.slurm("scontrol", "show", "job", "-o", f"{pool}_0")
    stage.wait(lambda: not elements(stage, run), "the pool has left the queue", 30, run)
