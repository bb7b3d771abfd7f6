"""Cancelling and requeuing a run, wherever it is: in the queue, running, held, or on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.controller.evaluation import begin_evaluation
from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.manage import cancel as stop
from hpcrl.launch.manage.cancel import cancel, requeue
from hpcrl.launch.manage.registry import states_of
from hpcrl.launch.manage.state import RunState
from hpcrl.launch.requeue import evaluation
from hpcrl.launch.requeue.evaluation import end_evaluation
from hpcrl.launch.scheduler import cancel_slurm
from hpcrl.rundir.commit import committed_directory, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import cancel_outcome, open_attempt, report_outcome
from tests.launch.manage.slurm_records import (
    CONFIG,
    FUTURE,
    PAST,
    committed_step,
    scancel,
    squeue,
    state,
    submitted,
)


def test_run_that_never_continues_is_not_requeued_by_hand(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    requeue(run)
    assert json.loads(run.stop.read_text()) == {"attempt": 1, "reason": "interrupted"}
    run.stop.unlink()
    write_text(run.config, CONFIG.replace("latest", "none"))
    with pytest.raises(RunError, match="mine would lose all progress"):
        requeue(run)
    assert not run.stop.exists()


def test_local_run_that_ends_while_it_is_cancelled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process, which counts as running until it is to be told to end."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()  # submitit"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:

        def ends(*_: object) -> RunState | None:
            process.communicate()  # it reads to the end, which is now
            return alive if process.returncode == 0 else None

        submitted(run, str(process.pid), "local")
        monkeypatch.setattr(stop, "_LEAVING_S", 0.0)
        alive = states_of([run])[0]
        assert alive.job.active
        monkeypatch.setattr(stop, "_await_end", ends)
        assert cancel(run, 0.0) is alive


def test_cancelled_in_the_queue(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    submitted(run, "8", at=1.0)
    squeue(monkeypatch, tmp_path)
    cancel_outcome(run, 1)
    assert state(run).kind == "cancelled"


def test_held_run_is_cancelled_without_slurm_being_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    for number in (1, 2):
        open_attempt(run, f"7.{number - 1}", ["n1"])
        report_outcome(run, number, "failed", "trainer-0: ValueError", "agent-0")
    squeue(monkeypatch, tmp_path)
    assert state(run).kind == "held"
    assert cancel(run, 0.0).kind == "cancelled"
    with pytest.raises(RunError, match="is not running: cancelled"):
        cancel(run, 0.0)


def test_all_requests_of_a_run_are_cancelled(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run, "7_0", requests={"large": "7_0", "small": "8_0"})
    squeue(monkeypatch, tmp_path, "7_0|PENDING|N/A|Priority|", "8_0|PENDING|N/A|Priority|")
    told = scancel(tmp_path)
    assert cancel(run, 0.0).kind == "cancelled"
    assert told.read_text() == "7_0\n8_0\n"


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_preempted_run_is_cancelled_in_the_queue(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """It has saved already, and must not start again."""
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    committed_step(run, 4)
    squeue(monkeypatch, tmp_path, f"7|PENDING|{FUTURE}|BeginTime|")
    told = scancel(tmp_path)
    assert state(run).kind == "preempted"
    began = time.monotonic()
    ended = cancel(run, patience_s)
    assert time.monotonic() - began < 10
    assert (ended.kind, ended.over, told.read_text()) == ("cancelled", True, "7\n")
    assert not run.stop.exists(), "the next attempt of a resumed run must not read it"


def test_running_run_is_asked_and_taken_away_only_now(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    told = scancel(tmp_path)
    asked = cancel(run, 1.0)
    assert (asked.kind, asked.over) == ("saving", False)
    assert json.loads(run.stop.read_text()) == {"attempt": 1, "reason": "cancelled"}
    assert not told.exists(), "what saves goes on saving"
    assert (cancel(run, 0.0).kind, told.read_text()) == ("cancelled", "7\n")


@pytest.mark.parametrize(("exported", "told_of"), [(False, "8_0\n7\n"), (True, "7\n")])
def test_a_job_that_would_upload_nothing_is_taken_away_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: bool, told_of: str
) -> None:
    settings = '[trainer]\neval_interval = 0\n[trainer.upload]\ns3 = "all"\ns3_bucket = "bucket"\n[trainer.policy.model]\npath = "m"\n[data]\ntrain_data = ["d"]\n'
    write_text(run.config, settings)
    submitted(run)
    write_json(run.submission, {**json.loads(run.submission.read_text()), "upload": "8_0"})
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    if exported:
        with committed_directory(run.export(4), 1) as directory:
            (directory / "config.json").write_text("{}")
    squeue(monkeypatch, tmp_path, f"7|PENDING|{FUTURE}|BeginTime|")
    told = scancel(tmp_path)
    assert cancel(run, 0.0).kind == "cancelled"
    assert sorted(told.read_text().splitlines()) == sorted(told_of.splitlines())


def test_the_evaluation_job_is_taken_away_with_its_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    write_json(run.submission, {**json.loads(run.submission.read_text()), "evaluation": "12"})
    squeue(monkeypatch, tmp_path, f"7|PENDING|{FUTURE}|Priority|")
    told = scancel(tmp_path)
    assert cancel(run, 0.0).kind == "cancelled"
    assert sorted(told.read_text().splitlines()) == ["12", "7"]


def test_a_record_names_no_option_of_scancel() -> None:
    with pytest.raises(SubmitError, match=r"expected the number of a job to cancel, found '--user=root'"):
        cancel_slurm("--user=root")


def test_the_evaluation_of_a_run_that_is_over(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    write_json(run.submission, {**json.loads(run.submission.read_text()), "evaluation": "12"})
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "done", "finished", "agent-0")
    squeue(monkeypatch, tmp_path, f"12_0|PENDING|{PAST}|None|")
    cancelled = scancel(tmp_path)
    with pytest.raises(RunError, match="is not running"):
        cancel(run, 0.0)
    begin_evaluation(run, 2, 1)
    assert cancel(run, 0.0).kind == "done"
    assert cancelled.read_text() == "12\n"


def test_the_end_of_the_evaluation_is_awaited(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    write_json(run.submission, {**json.loads(run.submission.read_text()), "evaluation": "12"})
    squeue(monkeypatch, tmp_path, f"12_0|RUNNING|{PAST}|None|")
    scancel(tmp_path)
    end_evaluation(run)
    (tmp_path / "bin" / "scancel").write_text("#!/bin/sh\n")
    squeue(monkeypatch, tmp_path, f"12_0|COMPLETING|{PAST}|None|")
    monkeypatch.setattr(evaluation, "_LEAVING_S", 0.0)
    with pytest.raises(RunError, match="evaluation job 12 of mine has not ended yet"):
        end_evaluation(run)
