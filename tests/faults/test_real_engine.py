"""Faults where the real vLLM matters: how it starts, dies and takes its processes along."""

from __future__ import annotations

from signal import SIGKILL

import pytest

from hpcrl.run.ledger import read_attempts
from tests.faults.history import assert_nothing_lost
from tests.faults.processes import send
from tests.faults.stage import START_S, Stage

pytestmark = pytest.mark.faults_slow


def test_engine_is_killed(stage: Stage) -> None:
    """The only engine dies: started again within the attempt."""
    run = stage.submit(stand_in=False)
    stage.reach(run, 3)
    send([stage.engine(run)], SIGKILL)
    assert_nothing_lost(stage, run, same_values=False)
    assert len(read_attempts(run)) == 1


def test_worker_is_killed(stage: Stage) -> None:
    """Its engine ends with it, and both come again."""
    run = stage.submit(stand_in=False)
    stage.reach(run, 3)
    engine = stage.engine(run)
    send([stage.worker(run)], SIGKILL)
    stage.wait(lambda: engine not in stage.processes(run), "its engine ends", 20, run)
    assert_nothing_lost(stage, run, same_values=False)
    assert len(read_attempts(run)) == 1


def test_signal_while_the_engine_starts(stage: Stage) -> None:
    run = stage.submit(stand_in=False)
    stage.wait(lambda: stage.processes(run, "hpcrl.rollout.serve"), "the engine is being started", START_S, run)
    stage.slurm("scancel", "--signal=USR2", stage.job_of(run))
    assert stage.outcome(run, 1, 60).kind == "interrupted"
    stage.outcome(run, 2, 240)
    assert_nothing_lost(stage, run, same_values=False)
