"""The process status of the trainer between its reports."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpcrl.rundir.commit import write_text
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.process_status import ProcessStatus, read_process_status
from hpcrl.runtime.signals import StopSignal
from hpcrl.trainer import controller_link
from hpcrl.trainer.controller_link import ControllerLink
from hpcrl.trainer.distributed import World
from hpcrl.trainer.metrics import PhaseTimer
from hpcrl.trainer.stop import StopConsensus
from tests.jobs.small_run import wait_for
from tests.trainer.material import make_run


def test_phase_and_micro_batches_are_shown_while_they_move(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_link, "_SHOWN_S", 0.02)
    run, timer = make_run(tmp_path / "run"), PhaseTimer()
    write_text(run.token, "token", mode=0o600)
    link = ControllerLink(run, 1, alone, StopConsensus(alone, StopSignal(), Heartbeat(run, 1, "rank-0")))

    def status() -> ProcessStatus:
        found = read_process_status(run, "trainer", 1)
        assert found
        return found

    with link.showing(timer):
        link.report("step 1/2", step=1, total=2)
        assert status().facts == {"step": 1, "total": 2}
        with timer("policy_train"):
            timer.count(3)
            for begun in (1, 2, 3):
                timer.begun = begun
                wanted = {"step": 1, "total": 2, "phase": "policy_train", "begun": begun, "expected": 3}
                wait_for(lambda wanted=wanted: status().facts == wanted, lambda: str(status()), 30)
            before = status().renewed
            time.sleep(0.3)
            assert status().renewed == before, "a phase that stands still grows old"
        with timer("save_checkpoints"):
            wait_for(lambda: status().facts["phase"] == "save_checkpoints", lambda: str(status()), 30)
    link.close("finished")
    assert (status().state, status().facts) == ("finished", {})
