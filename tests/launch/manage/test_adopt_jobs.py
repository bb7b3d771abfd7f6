"""Jobs in the queue that no run directory names are found and recorded."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from hpcrl.launch.requeue.requests import recorded_requests
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from tests.launch.manage.slurm_records import (
    CONFIG,
    PAST,
    script_of,
    squeue,
    state,
    submitted,
)


def test_job_that_nobody_recorded_is_found_in_the_queue(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Run(run.path.with_name("other"))
    write_text(other.config, CONFIG)
    script = script_of(tmp_path / "runs" / "project" / ".slurm" / "sweep", [other, run])
    strange = "9_1|RUNNING|N/A|None|/elsewhere/.slurm/sweep/.submission_file_1.sh"
    squeue(monkeypatch, tmp_path, f"8_0|PENDING|N/A|Priority|{script}", f"8_1|PENDING|N/A|Priority|{script}", strange)
    found = state(run)
    assert (found.kind, found.found, found.submission["job_id"]) == ("pending", True, "8_1")
    again = state(run)
    assert (again.found, again.submission["job_id"]) == (False, "8_1"), "it was recorded"
    assert not other.submission.exists()
    assert state(other).submission["job_id"] == "8_0"


def test_all_requests_of_a_run_that_nobody_recorded_are_found(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_of(tmp_path / "runs" / "project" / ".slurm" / "mine", [run])
    squeue(monkeypatch, tmp_path, f"8_0|PENDING|N/A|Priority|{script}", f"9_0|RUNNING|{PAST}|None|{script}")
    found = state(run)
    assert (found.kind, found.found, found.submission["job_id"]) == ("starting", True, "9_0")
    assert list(recorded_requests(run).values()) == ["8_0", "9_0"]
    assert not state(run).found


@pytest.mark.parametrize("content", ["", "{", "7", "[1, 2]", "[" * 100_000])
def test_a_damaged_list_of_another_sweep_hides_no_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    submitted(run, "5_0")
    script = script_of(tmp_path / "runs" / "project" / ".slurm" / "sweep", [run])
    for path in script.parent.glob("*.json"):
        path.write_text(content)
    squeue(monkeypatch, tmp_path, f"5_0|PENDING|N/A|Priority|{script}", f"8_1|PENDING|N/A|Priority|{script}")
    assert state(run).kind == "pending"


def test_resume_that_died_before_it_recorded_its_job(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run, "5_0")
    write_json(run.submission, {**json.loads(run.submission.read_text()), "overrides": ["trainer.seed=1"]})
    open_attempt(run, "5_0.0", ["n1"])
    report_outcome(run, 1, "failed", "trainer-0: ValueError", "agent-0")
    script = script_of(tmp_path / "runs" / "project" / ".slurm" / "mine", [run])
    line = f"8_0|RUNNING|{PAST}|None|{script}"
    squeue(monkeypatch, tmp_path, line)
    with run.submission.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert state(run).submission["job_id"] == "8_0"
        assert json.loads(run.submission.read_text())["job_id"] == "5_0", "somebody is about to record it"
    assert (state(run).kind, state(run).submission["job_id"]) == ("starting", "8_0")
    assert json.loads(run.submission.read_text())["overrides"] == ["trainer.seed=1"]
    squeue(monkeypatch, tmp_path, f"5_0|PENDING|N/A|Priority|{script}", line)
    submitted(run, "5_0")
    assert state(run).submission["job_id"] == "5_0", "the recorded one is alive"
