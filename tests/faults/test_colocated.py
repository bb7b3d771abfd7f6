"""Trainer and engine on one node, in turns (scenario 49): whoever has the devices dies, waits or is preempted."""

from __future__ import annotations

from signal import SIGKILL

import pytest

from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.runtime.process_status import read_process_status
from tests.faults.history import assert_ended, assert_nothing_lost
from tests.faults.scenario import START_S, Scenario, fault, in_first_attempt
from tests.faults.test_preemption import saved_when_told
from tests.processes import send

COLOCATED = {"trainer.placement.colocate_all": True}
ONCE = {**COLOCATED, "trainer.ckpt_interval": 100}
IN_STEP_4 = "update.micro_batch@14"  # four of them make a step

pytestmark = [pytest.mark.nodes(1), pytest.mark.faults_slow]


def until_it_trains(scenario: Scenario, run: Run) -> None:
    """Return when the trainer is in the middle of step 4, where a fault point holds it."""
    log = run.log(1, "trainer-0")
    held = f"fault point {IN_STEP_4.partition('@')[0]}"
    scenario.wait(lambda: log.exists() and held in log.read_text(), "the middle of step 4", START_S, run)
    assert state_of(run, "rollout-0") == "asleep"


def until_it_generates(scenario: Scenario, run: Run) -> None:
    scenario.reach(run, 3)
    scenario.knobs(latency_s=4.0)
    scenario.wait(lambda: state_of(run, "trainer").startswith("waiting"), "the engine's turn", START_S, run)
    scenario.wait(lambda: state_of(run, "rollout-0").startswith("generating"), "groups in flight", START_S, run)


def state_of(run: Run, process: str, attempt: int = 1) -> str:
    status = read_process_status(run, process, attempt)
    return status.state if status else ""


def test_49_the_worker_is_killed_while_the_trainer_trains(scenario: Scenario) -> None:
    """The one in its place waits for its turn before it starts its engine, within the attempt."""
    run = scenario.submit(COLOCATED, setup=[fault(f"{IN_STEP_4}:sleep=12")])
    until_it_trains(scenario, run)
    send([scenario.worker(run)], SIGKILL)
    scenario.wait(lambda: state_of(run, "rollout-0") == "waiting for its turn", "a new worker", 10, run)
    assert not scenario.processes(run, "hpcrl.rollout.engines.vllm.main"), "and no engine"
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1


@pytest.mark.parametrize("victim", ["worker", "engine", "rank"])
def test_49_one_of_them_is_killed_while_the_engine_generates(scenario: Scenario, victim: str) -> None:
    """A worker is started again at once, as it is its turn; without the trainer the attempt is over, and the next one goes on."""
    run = scenario.submit(COLOCATED)
    until_it_generates(scenario, run)
    victims = {"worker": scenario.worker, "engine": scenario.engine, "rank": scenario.rank}
    send([victims[victim](run)], SIGKILL)
    scenario.wait(lambda: len(scenario.processes(run, "/jobs/")) < 3, "it is gone", 30, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == (2 if victim == "rank" else 1)


@pytest.mark.parametrize("turn", ["trainer", "engine"])
def test_49_preemption_in_the_turn_of(scenario: Scenario, turn: str) -> None:
    """All that was trained is saved, from the device or from host memory, and the run comes back."""
    run = scenario.submit(ONCE, setup=[in_first_attempt(fault(f"{IN_STEP_4}:sleep=5"))] if turn == "trainer" else [])
    (until_it_trains if turn == "trainer" else until_it_generates)(scenario, run)
    scenario.preempt()
    if turn == "trainer":
        assert scenario.outcome(run, 1, 30).kind == "interrupted"
    else:
        saved_when_told(scenario, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 2


def test_49_an_engine_has_no_memory_to_wake(scenario: Scenario) -> None:
    """The run ends, and says what the engine wants."""
    run = scenario.submit({**COLOCATED, "slurm.replica_restarts": 0, "slurm.crash_budget": 1})
    scenario.reach(run, 2)
    scenario.knobs(short_of_memory=True)
    assert_ended(scenario, run, "failed")
    told = scenario.told("status", str(run.path))
    assert "does not wake" in told, told
    assert "generator.inference_engine.gpu_memory_utilization" in told
