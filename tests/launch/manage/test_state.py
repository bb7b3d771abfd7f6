"""The state of a run from its files and from what Slurm says of its job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpcrl.errors import RunError
from hpcrl.launch.attach.stacks import stacks
from hpcrl.launch.manage.cancel import cancel, requeue
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.runtime.process_status import StatusWriter
from tests.filesystem.small import fill, small_filesystem
from tests.launch.manage.slurm_records import (
    CONFIG,
    FAR,
    FUTURE,
    PAST,
    committed_step,
    scancel,
    squeue,
    state,
    submitted,
    trained,
)


def test_states_through_the_life_of_a_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    squeue(monkeypatch, tmp_path, "7|PENDING|N/A|Priority|")
    assert (state(run).kind, state(run).detail) == ("pending", "Priority: jobs with a higher priority come first")
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    assert state(run).kind == "starting"
    open_attempt(run, "7.0", ["n1"])
    assert state(run).kind == "running"
    report_outcome(run, 1, "failed", "trainer-0: ValueError", "agent-0")
    assert (state(run).kind, state(run).detail) == ("ending", "failed: trainer-0: ValueError")
    squeue(monkeypatch, tmp_path, f"8|RUNNING|{PAST}|None|")
    assert (state(run).kind, state(run).over) == ("failed", True)
    submitted(run, "9")
    squeue(monkeypatch, tmp_path, "9|PENDING|N/A|Resources|")
    assert (state(run).kind, state(run).over) == ("pending", False)
    squeue(monkeypatch, tmp_path, f"9|RUNNING|{PAST}|None|")
    open_attempt(run, "9.0", ["n1"])
    assert state(run).kind == "running", "whatever the clocks of the nodes say"
    squeue(monkeypatch, tmp_path)
    assert state(run).kind == "lost"
    open_attempt(run, "9.1", ["n1"])
    report_outcome(run, 3, "done", "finished", "agent-0")
    assert state(run).kind == "done"


def test_a_run_that_left_no_outcome_says_that_its_filesystem_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(monkeypatch, tmp_path)
    with small_filesystem(tmp_path / "small", "512k") as mounted:
        if not mounted:
            pytest.skip("no filesystem can be mounted here")
        run = Run(tmp_path / "small" / "project" / "mine")
        write_text(run.config, CONFIG)
        submitted(run)
        open_attempt(run, "7.0", ["n1"])
        assert state(run).detail == "Slurm no longer knows its job, and it left no outcome"
        fill(run.path)
        assert f"; the filesystem of {run.path} is full (0 B free): make room" in state(run).detail


def test_a_run_of_this_machine_that_left_no_outcome(run: Run) -> None:
    submitted(run, "1234567", executor="local")
    open_attempt(run, "local-1234567", ["n1"])
    assert (state(run).kind, state(run).detail) == ("lost", "its processes have ended, and it left no outcome")


def test_preempted_run_waits_and_starts_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    squeue(monkeypatch, tmp_path, f"7|PENDING|{FUTURE}|BeginTime|")
    detail = state(run).detail
    assert state(run).kind == "preempted"
    assert "nothing was committed yet; BeginTime: Slurm lets it wait a while; may start at 2" in detail
    committed_step(run, 4)
    assert "goes on from s000004" in state(run).detail
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{FUTURE}|None|")
    assert state(run).kind == "starting", "the job started after the outcome: that is of the attempt before"


def test_job_that_restarts_after_a_death_without_a_word_is_starting(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node failed, or there was no grace time: the last attempt has no outcome, and nobody who would hear a request."""
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    StatusWriter(run, "trainer", 1).write("step 41/50", step=41, total=50)
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{FUTURE}|None|")
    assert state(run).kind == "running", "the clocks are wrong, but somebody was heard of just now"
    os.utime(run.status_file("trainer"), (time.time() - 100, time.time() - 100))
    assert (state(run).kind, state(run).detail) == ("starting", "its job runs, its agents have not begun")
    with pytest.raises(RunError, match="try again in a moment"):
        requeue(run)
    with pytest.raises(RunError, match="no processes"):
        stacks(run)
    told = scancel(tmp_path)
    assert (cancel(run, 60.0).kind, told.read_text()) == ("cancelled", "7\n")
    assert not run.stop.exists()


def test_crash_that_was_queued_again_says_how_often(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "failed", "trainer-0: ValueError", "agent-0", "n1")
    squeue(monkeypatch, tmp_path, "7|PENDING|N/A|Priority|")
    assert state(run).kind == "pending"
    assert (
        "queued again after crash 1 of 2 without a new checkpoint (step 0): trainer-0: ValueError" in state(run).detail
    )
    open_attempt(run, "7.1", ["n1"])
    report_outcome(run, 2, "hang", "trainer-0 has made no progress", "agent-0", "n1")
    squeue(monkeypatch, tmp_path, f"7|FAILED|{PAST}|None|")
    held = state(run)
    assert (held.kind, held.over) == ("held", True)
    assert "crash 2 of 2" in held.detail
    assert "hpcrl resume mine" in held.advice


def test_interrupted_run_that_is_not_queued_again_says_why(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    squeue(monkeypatch, tmp_path)
    assert (state(run).kind, state(run).detail) == ("interrupted", "saved and stopped")
    write_text(run.config, CONFIG.replace("latest", "none"))
    assert state(run).detail == "saved and stopped; not requeued, because trainer.resume_mode is none"
    assert state(run).advice == "hpcrl resume mine continues it"


@pytest.mark.parametrize(
    ("line", "word", "text"),
    [
        ("7|PENDING|N/A|JobHeldUser|", "held", "scontrol release 7"),
        ("7|PENDING|N/A|launch failed requeued held|", "held", "Slurm could not start it and holds it"),
        ("7|PENDING|N/A|job requeued in held state|", "held", "scontrol release 7"),
        ("7|REQUEUE_HOLD|N/A|None|", "held", "scontrol release 7"),
        (f"7|PENDING|{FAR}|Resources|", "preempted", "it is the next for which nodes are not free yet"),
        ("7|PENDING|SOON|Resources|", "preempted", "Slurm expects it to start at 2"),
        ("7|PENDING|N/A|QOSMaxJobsPerUserLimit|", "preempted", "a limit of its QOS is reached"),
        (f"7|SUSPENDED|{PAST}|None|", "suspended", "Slurm has suspended it"),
        (f"7|COMPLETING|{PAST}|None|", "ending", ""),
        (f"7|CANCELLED|{PAST}|None|", "cancelled", "cancelled in Slurm"),
        (f"7|TIMEOUT|{PAST}|None|", "lost", "its job ended as TIMEOUT in Slurm"),
    ],
)
def test_what_slurm_does_to_a_job_that_ran(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, word: str, text: str
) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, line.replace("SOON", FUTURE))
    assert state(run).kind == word
    assert text in state(run).detail
    assert ("expects it to start" in state(run).detail) == ("SOON" in line)


def test_running_says_how_far(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    assert state(run).detail.startswith("starting")
    StatusWriter(run, "controller", 1).write("serving", replicas=2)
    assert "starting · replicas 0/2" in state(run).detail
    StatusWriter(run, "trainer", 1).write("step 12/40", step=12, total=40)
    trained(run, 11, 3.0)
    StatusWriter(run, "rollout-0", 1).write("generating", version=11)
    StatusWriter(run, "rollout-1", 1).write("starting engine")
    committed_step(run, 10)
    os.utime(run.checkpoint(10) / "COMMIT", (time.time() - 200, time.time() - 200))
    assert state(run).detail == "step 12/40 · 3.0 s/step · ETA 1:27 · replicas 1/2 · last commit 3:20 ago (s000010)"
    StatusWriter(run, "trainer", 1).write("saving", step=12, total=40)
    assert state(run).kind == "saving"
    StatusWriter(run, "trainer", 1).write("waiting for batch", step=12)
    write_json(run.stop, {"attempt": 1, "reason": "cancelled"})
    assert (state(run).kind, state(run).detail.startswith("asked to stop (cancelled)")) == ("saving", True)
    for path in run.endpoints.iterdir():
        os.utime(path, (time.time() - 500, time.time() - 500))
    assert state(run).detail.endswith("replicas 0/2 · last commit 3:20 ago (s000010) · silent for 8:20")


def test_array_that_was_cancelled_before_it_began(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run, "7_3")
    squeue(monkeypatch, tmp_path, f"7|CANCELLED|{PAST}|None|")
    assert state(run).kind == "cancelled"
    squeue(monkeypatch, tmp_path, "7|PENDING|N/A|Priority|")
    assert state(run).kind == "lost", "this element is no longer among those that wait"


def test_what_no_further_attempt_can_help_is_not_advised_to_be_resumed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "failed", "controller: DataError: the tokenizer of 'no/model' cannot be loaded", "agent-0")
    squeue(monkeypatch, tmp_path)
    assert state(run).kind == "failed"
    assert state(run).advice.startswith("another attempt would end the same way: put that right, then hpcrl resume")


def test_words_that_contradict_each_other_are_not_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    squeue(monkeypatch, tmp_path, "7|PENDING|N/A||")
    assert (state(run).kind, state(run).detail) == ("pending", "Slurm has given no reason yet")
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    open_attempt(run, "7.0", ["n1"])
    StatusWriter(run, "trainer", 1).write("finished", step=9, total=9)
    assert state(run).kind == "running"
    assert state(run).detail.startswith("all steps are trained")
