"""The state of a run from its files and from what Slurm says; a stand-in for squeue prints what the real one would."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.registry import RunState, all_runs, find_run, states_of
from hpcrl.run.commit import write_json, write_text
from hpcrl.run.layout import Run
from hpcrl.run.ledger import cancel_outcome, open_attempt, report_outcome


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "runs" / "project" / "mine")
    write_text(run.config, "")
    return run


def submitted(run: Run, job: str = "7", executor: str = "slurm", at: float = 1.0, host: str | None = None) -> None:
    record = {
        "executor": executor,
        "job_id": job,
        "overrides": [],
        "submitted": at,
        "host": host or socket.gethostname(),
    }
    write_json(run.submission, record)


def squeue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, status: int = 0) -> None:
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        f"#!/bin/sh\nprintf '%s' '{line}'\n[ {status} = 0 ] || echo 'Unable to contact slurm controller' >&2\nexit {status}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def state(run: Run) -> RunState:
    return states_of([run])[0]


def test_states_through_the_life_of_a_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    squeue(monkeypatch, tmp_path, "7|PENDING|Priority")
    assert (state(run).word, state(run).detail) == ("pending", "Priority")
    squeue(monkeypatch, tmp_path, "7|RUNNING|None")
    assert state(run).word == "starting"
    open_attempt(run, "7.0", ["n1"])
    assert state(run).word == "running"
    report_outcome(run, 1, "failed", "trainer-0: ValueError", "agent-0")
    assert (state(run).word, state(run).detail) == ("ending", "failed: trainer-0: ValueError")
    squeue(monkeypatch, tmp_path, "8|RUNNING|None")
    assert (state(run).word, state(run).over) == ("failed", True)
    submitted(run, "9")
    squeue(monkeypatch, tmp_path, "9|PENDING|Resources")
    assert (state(run).word, state(run).over) == ("pending", False)
    squeue(monkeypatch, tmp_path, "9|RUNNING|None")
    open_attempt(run, "9.0", ["n1"])
    assert state(run).word == "running", "whatever the clocks of the nodes say"
    squeue(monkeypatch, tmp_path, "")
    assert state(run).word == "lost"
    open_attempt(run, "9.1", ["n1"])
    report_outcome(run, 3, "done", "finished", "agent-0")
    assert state(run).word == "done"


def test_cancelled_in_the_queue(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    submitted(run, "8", at=1.0)
    squeue(monkeypatch, tmp_path, "")
    cancel_outcome(run, 1)
    assert state(run).word == "cancelled"


@pytest.mark.parametrize("status", [0, 1])
def test_slurm_that_does_not_answer_makes_no_run_pass_for_gone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    submitted(run)
    if status:
        squeue(monkeypatch, tmp_path, "", status)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="Unable to contact slurm controller" if status else "squeue was not found"):
        state(run)


def test_local_run_is_asked_for_on_its_host(run: Run) -> None:
    submitted(run, "1", "local", host="elsewhere")
    with pytest.raises(RunError, match="on elsewhere; ask there"):
        state(run)
    submitted(run, str(os.getpid()), "local")
    assert not state(run).job.active, "this process is not submitit's"


def test_runs_by_name(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_text(root / "other" / "mine" / "config.toml", "")
    write_text(root / "other" / ".slurm" / "config.toml", "")
    assert [f"{found.project}/{found.name}" for found in all_runs(root)] == ["other/mine", "project/mine"]
    assert find_run("project/mine", root) == run
    assert find_run(str(run.path), root) == run
    with pytest.raises(RunError, match="several runs are called mine: other/mine, project/mine"):
        find_run("mine", root)


def test_runs_by_the_beginning_of_a_name(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name in ("a/q.1-seed-1", "a/q.10-seed-10", "a/q.2-seed-2", "a/exp2", "b/q.2-seed-3"):
        write_text(root / name / "config.toml", "")
    assert find_run("q.1", root).name == "q.1-seed-1"
    assert find_run("b/q.2", root).name == "q.2-seed-3"
    with pytest.raises(
        RunError, match=r"several runs begin with q\.2-: a/q\.2-seed-2, b/q\.2-seed-3; write more of the name"
    ):
        find_run("q.2", root)
    with pytest.raises(RunError, match=r"no run 'exp' under .*; runs that begin so: a/exp2; give its path"):
        find_run("exp", root)
    with pytest.raises(RunError, match=r"no run 'q' under .*; runs that begin so: a/q\.1-seed-1, .*b/q\.2-seed-3;"):
        find_run("q", root)
    write_text(root / "a" / "q.1" / "config.toml", "")
    assert find_run("q.1", root).name == "q.1", "a whole name comes first"
