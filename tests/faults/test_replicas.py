"""Rollout replicas that die, hang, come late or lie (scenarios 22 to 24 and 37), and how the real vLLM starts, dies and takes its processes along."""

from __future__ import annotations

from signal import SIGKILL, SIGSTOP

import pytest

from hpcrl.rundir.ledger import read_attempts
from hpcrl.runtime.process_status import read_process_statuses
from tests.faults.history import assert_nothing_lost
from tests.faults.processes import send
from tests.faults.stage import START_S, Stage

TWO = {"generator.inference_engine.num_engines": 2}


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_22_node_of_a_replica_goes_down(stage: Stage) -> None:
    """Training goes on with the other replica, in the same attempt: --no-kill."""
    run = stage.submit({**TWO, "trainer.max_steps": 30})
    stage.knobs(latency_s=1.0)
    stage.reach(run, 3)
    lost = read_attempts(run)[0].hosts[-1]
    stage.cluster.stop(lost)
    try:
        stage.reach(run, 8)
        stage.knobs()
        assert_nothing_lost(stage, run, steps=30)
    finally:
        stage.cluster.start(lost)
    assert len(read_attempts(run)) == 1


@pytest.mark.parametrize("victim", ["engine", pytest.param("worker", marks=pytest.mark.faults_slow)])
def test_23_engine_ends(stage: Stage, victim: str) -> None:
    """The only replica dies: it is started again within the attempt, and its groups are generated anew."""
    run = stage.submit()
    stage.reach(run, 3)
    send([stage.engine(run) if victim == "engine" else stage.worker(run)], SIGKILL)
    assert_nothing_lost(stage, run)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(3)
def test_23_engine_core_hangs_while_its_server_is_healthy(stage: Stage) -> None:
    """SIGSTOP of the engine core, /health answers 200: noticed by its lack of progress, its groups go to the other replica."""
    run = stage.submit({**TWO, "trainer.max_steps": 20, "generator.inference_engine.stall_timeout_seconds": 5})
    stage.reach(run, 3)
    send([stage.engine_core(run, 1)], SIGSTOP)
    assert_nothing_lost(stage, run, steps=20, same_values=False)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_23_out_of_memory_at_load(stage: Stage) -> None:
    """One replica never loads its model: it is given up after its restarts, and the other one does the work."""
    stage.knobs(**{"rollout-1": {"out_of_memory": True}})
    run = stage.submit({**TWO, "slurm.replica_restarts": 1})
    assert_nothing_lost(stage, run)
    assert len(read_attempts(run)) == 1
    (process_status,) = [
        process_status for process_status in read_process_statuses(run) if process_status.process == "rollout-1"
    ]
    assert "given up" in process_status.state
    assert "OutOfMemory" in process_status.state


@pytest.mark.faults_slow
def test_23_weights_that_the_engine_did_not_take(stage: Stage) -> None:
    """The engine says that it holds another version than it was given: it does not serve, and is started again."""
    run = stage.submit()
    stage.reach(run, 3)
    stage.knobs(stale=True)
    stage.wait(lambda: "says that it holds" in run.log(1, "rollout-0").read_text(), "it is noticed", 60, run)
    stage.knobs()
    assert_nothing_lost(stage, run)
    assert len(read_attempts(run)) == 1


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_23_slow_start(stage: Stage) -> None:
    """A replica comes when the others have trained for long: it loads the newest weights first, and then works."""
    stage.knobs(latency_s=0.5, **{"rollout-1": {"start_s": 20}})
    run = stage.submit({**TWO, "trainer.max_steps": 60})
    stage.reach(run, 3)
    stage.wait(lambda: list(run.samples_of(1).glob("g*")), "the late replica's first group", 90, run)
    stage.knobs()
    assert_nothing_lost(stage, run, steps=60)
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
def test_24_all_replicas_are_gone(stage: Stage) -> None:
    """The only replica cannot come back: a bounded wait, everything trained is saved, and the attempt ends with the reason."""
    patience = {"slurm.replica_restarts": 1, "slurm.replica_patience_minutes": 1}
    run = stage.submit({**patience, "trainer.ckpt_interval": 100})
    stage.reach(run, 4)
    stage.knobs(out_of_memory=True)
    send([stage.engine(run)], SIGKILL)
    outcome = stage.outcome(run, 1, 150)
    assert outcome.kind == "failed"
    assert "rollout-0" in outcome.message or "replica" in outcome.message
    stage.knobs()
    stage.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    assert_nothing_lost(stage, run)


@pytest.mark.faults_slow
def test_engine_is_killed(stage: Stage) -> None:
    """The only engine dies: started again within the attempt."""
    run = stage.submit(stand_in=False)
    stage.reach(run, 3)
    send([stage.engine(run)], SIGKILL)
    assert_nothing_lost(stage, run, same_values=False)
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
def test_worker_is_killed(stage: Stage) -> None:
    """Its engine ends with it, and both come again."""
    run = stage.submit(stand_in=False)
    stage.reach(run, 3)
    engine = stage.engine(run)
    send([stage.worker(run)], SIGKILL)
    stage.wait(lambda: engine not in stage.processes(run), "its engine ends", 20, run)
    assert_nothing_lost(stage, run, same_values=False)
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
def test_signal_while_the_engine_starts(stage: Stage) -> None:
    run = stage.submit(stand_in=False)
    stage.wait(lambda: stage.processes(run, "hpcrl.rollout.vllm.main"), "the engine is being started", START_S, run)
    stage.slurm("scancel", "--signal=USR2", stage.job_of(run))
    assert stage.outcome(run, 1, 60).kind == "interrupted"
    stage.outcome(run, 2, 240)
    assert_nothing_lost(stage, run, same_values=False)
