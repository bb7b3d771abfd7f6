"""Which of several jobs that wait for a run has it; a stand-in for squeue prints what the real one would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest

from hpcrl.launch.requeue import prologue
from hpcrl.launch.requeue.prologue import NOTHING_TO_DO, over, take
from hpcrl.launch.requeue.requests import cancel_others, other_jobs, recorded_requests
from hpcrl.launch.requeue.takeover import Takeover
from hpcrl.observe.summary import STEP_SECONDS
from hpcrl.rundir.claims import RunClaim, claim, give_back, read_claim
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.growth import GrowthRecord, read_growth, write_growth
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Kind, cancel_outcome, open_attempt, read_attempts, report_outcome
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.runtime.signals import ask_to_stop, stop_asked, stop_cause

CONFIG = '[trainer]\nresume_mode = "latest"\n[slurm]\ncrash_budget = 2\n'


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with two requests, of jobs 7_0 and 8_0."""
    run = Run(tmp_path / "run")
    write_text(run.config, CONFIG)
    record = {"executor": "slurm", "job_id": "7_0", "requests": {"large": "7_0", "small": "8_0"}, "submitted": 1.0}
    write_json(run.submission, record)
    return run


def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **states: str) -> Path:
    """Put programs of Slurm on PATH, for which the jobs _7_0 and so on have these states; return where their calls are noted."""
    lines = "".join(f"{job[1:]}|{state}|N/A|None|\n" for job, state in states.items())
    (tmp_path / "printed").write_text(lines)
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name in ("squeue", "scontrol", "scancel"):
        printed = f"cat {tmp_path}/printed" if name == "squeue" else f'echo "{name} $@" >> {tmp_path}/called'
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{printed}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path / "called"


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "CONFIGURING"])
def test_a_job_that_starts_while_another_has_the_run_has_it_not(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    slurm(tmp_path, monkeypatch, _7_0=state, _8_0="RUNNING")
    assert take(run, "7_0.0") is None
    assert take(run, "8_0.0") == "7_0"
    assert take(run, "7_0.0") is None, "it has the run already"
    assert read_claim(run) == RunClaim(1, "7_0.0")


@pytest.mark.parametrize("state", ["PENDING", "CANCELLED", "TIMEOUT", None])
def test_a_job_without_processes_has_the_run_no_longer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    """Slurm has queued it again, ended it or forgotten it, and its batch script could not give the run back."""
    assert claim(run, "7_0.0", read_claim(run))
    slurm(tmp_path, monkeypatch, _8_0="RUNNING", **({"_7_0": state} if state else {}))
    assert take(run, "8_0.0") is None
    assert read_claim(run) == RunClaim(2, "8_0.0")


def test_a_job_that_slurm_started_again_claims_the_run_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claim(run, "7_0.0", read_claim(run))
    slurm(tmp_path, monkeypatch, _7_0="RUNNING")
    assert take(run, "7_0.1") is None
    assert read_claim(run) == RunClaim(2, "7_0.1")


def test_nobody_claims_a_run_while_slurm_does_not_answer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claim(run, "7_0.0", read_claim(run))
    slurm(tmp_path, monkeypatch)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    monkeypatch.setattr(prologue, "PATIENCE_S", 0.0)
    assert take(run, "8_0.0") == "7_0"


def test_an_attempt_that_saves_and_stops_is_waited_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch, _7_0="RUNNING", _8_0="RUNNING")
    assert take(run, "7_0.0") is None
    open_attempt(run, "7_0.0", ["n1"])
    ask_to_stop(run, 1, "interrupted")
    monkeypatch.setattr(prologue, "_LEAVING_S", 0.2)
    monkeypatch.setattr(prologue, "_LOOK_S", 0.05)
    began = time.monotonic()
    assert take(run, "8_0.0") == "7_0", "not for ever"
    assert time.monotonic() - began >= 0.2
    monkeypatch.setattr(prologue, "_LEAVING_S", 30.0)
    monkeypatch.setattr(prologue.time, "sleep", lambda _: give_back(run, "7_0.0"))
    assert take(run, "8_0.0") is None


@pytest.mark.parametrize("round_", range(5))
def test_two_that_start_together_never_both_have_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round_: int
) -> None:
    slurm(tmp_path, monkeypatch, _7_0="RUNNING", _8_0="RUNNING", _9_0="RUNNING")
    children = []
    for job in ("7_0", "8_0", "9_0"):
        child = os.fork()
        if child == 0:
            os._exit(0 if take(run, f"{job}.{round_}") is None else 1)
        children.append(child)
    assert sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children) == [0, 1, 1]


@pytest.mark.parametrize(
    ("kinds", "ended"),
    [
        ([], None),
        (["interrupted"], None),
        (["failed"], None),
        (["failed", "failed"], "crash 2 of 2"),
        (["done"], "finished"),
        (["cancelled"], "finished"),
    ],
)
def test_whether_a_run_needs_another_attempt(run: Run, kinds: list[Kind], ended: str | None) -> None:
    """The attempts were of the one job, and the other one has started: crashes are counted for both together."""
    for number, kind in enumerate(kinds, 1):
        open_attempt(run, f"{7 + number % 2}_0.{number}", ["n1"])
        report_outcome(run, number, kind, "finished", "agent-0")
    found = over(run, "7_0.9")
    assert (found is None) == (ended is None)
    assert ended is None or ended in (found or "")


def test_an_attempt_of_an_earlier_submission_decides_nothing(run: Run) -> None:
    open_attempt(run, "5_0.0", ["n1"])
    report_outcome(run, 1, "done", "finished", "agent-0")
    assert over(run, "7_0.0") is None, "it was resumed with a later end"


def test_a_resumed_run_is_not_over_by_the_record_of_its_earlier_submission(run: Run) -> None:
    open_attempt(run, "7_0.0", ["n1"])
    report_outcome(run, 1, "done", "finished", "agent-0")
    assert over(run, "9_0.0") is None, "`hpcrl resume` has yet to record job 9_0"


def test_a_run_that_was_cancelled_in_the_queue_or_while_its_job_was_killed_is_over(run: Run) -> None:
    open_attempt(run, "8_0.0", ["n1"])
    ask_to_stop(run, 1, "cancelled")
    assert (over(run, "7_0.0") or "").startswith("cancelled")
    cancel_outcome(run, 0)
    assert (over(run, "7_0.0") or "").startswith("cancelled")


def begin(run: Run, tmp_path: Path, job: str, *layouts: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the beginning of a batch script."""
    write_json(tmp_path / "elements.json", [str(run.path)])
    nodes = {"7": "4", "8": "2"}[job]
    environment = {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_NUM_NODES": nodes, **variables}
    command = [sys.executable, "-m", "hpcrl.launch.requeue.prologue", str(tmp_path / "elements.json"), *layouts]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_job_that_has_the_run_makes_the_others_wait(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = slurm(tmp_path, monkeypatch, _7_0="RUNNING", _8_0="PENDING")
    done = begin(run, tmp_path, "7")
    assert done.returncode == 0, done.stderr
    assert called.read_text() == "scontrol update JobId=8_0 Dependency=afterany:7_0\n"
    open_attempt(run, "7_0.0", ["n1"])
    report_outcome(run, 1, "done", "finished", "agent-0")
    give_back(run, "7_0.0")
    done = begin(run, tmp_path, "8")
    assert (done.returncode, "nothing to do: done: finished" in done.stdout) == (NOTHING_TO_DO, True), done


@pytest.fixture
def growing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Job 8_0 has the run on two nodes, and a larger one has started; 200 steps of a minute are left."""
    write_text(run.config, CONFIG + "grow_minutes = 60\nsignal_seconds = 20\n")
    slurm(tmp_path, monkeypatch, _7_0="RUNNING", _8_0="RUNNING")
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(squeue.read_text().replace("cat", "case $* in *%e*) exec date -d '+8 hours' +%FT%T; esac\ncat"))
    monkeypatch.setattr(prologue, "_LEAVING_S", -20.0)
    assert take(run, "8_0.0") is None
    return run


def train(run: Run, steps: int, total: int, returned: Sequence[str] = ()) -> None:
    """Open the attempt of job 8_0, and let it train steps of a minute."""
    attempt = open_attempt(run, "8_0.0", ["n1", "n2"], returned=returned)
    times = [{"step": step, "time": attempt.started + 60 * step} for step in range(1, steps + 1)]
    run.metrics.mkdir()
    lines = [json.dumps({"attempt": 1, **each, "metrics": {STEP_SECONDS: 60.0}}) for each in times]
    run.metrics_of("trainer").write_text("\n".join(lines))
    StatusWriter(run, "trainer", 1).write("a step", total=total)


def takes_over(run: Run, nodes: int, layouts: dict[str, list[int]]) -> bool:
    """Return whether job 7_0 asks the attempt of job 8_0 to stop."""
    assert take(run, "7_0.0", Takeover(run, "7_0", nodes, layouts)) == "8_0"
    return stop_asked(run, 1) is not None


@pytest.mark.parametrize("steps", [12, 1])
def test_a_larger_request_takes_the_run_over(growing: Run, steps: int) -> None:
    """One step measures nothing, and is little to lose."""
    train(growing, steps, total=212)
    assert takes_over(growing, 4, {"large": [4], "small": [2]})
    assert stop_cause(growing, 1) == "job 7_0 has started on 4 nodes"
    found = read_growth(growing)
    assert found
    assert (found.attempt, found.nodes, found.job) == (1, 4, "7_0")


def test_an_attempt_that_has_not_begun_is_waited_for(growing: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prologue, "_LEAVING_S", 30.0)
    monkeypatch.setattr(prologue, "_LOOK_S", 0.0)

    def go_on(_: float) -> None:
        if not read_attempts(growing):
            train(growing, 1, total=200)
        elif stop_asked(growing, 1):
            give_back(growing, "8_0.0")

    monkeypatch.setattr(prologue.time, "sleep", go_on)
    assert take(growing, "7_0.0", Takeover(growing, "7_0", 4, {"large": [4], "small": [2]})) is None
    assert stop_asked(growing, 1) == "interrupted"


@pytest.mark.parametrize(
    "why", ["not larger", "no larger layout", "few steps", "recently", "other GPUs", "switched off", "never resumes"]
)
def test_what_keeps_a_larger_request_from_taking_the_run_over(growing: Run, why: str) -> None:
    train(growing, 12, total=13 if why == "few steps" else 212)
    if why == "recently":
        write_growth(growing, GrowthRecord(1, time.time() - 3000, 3, "8_0"))
    elif why == "never resumes":
        write_text(growing.config, growing.config.read_text().replace("latest", "none"))
    layouts = {"other GPUs": {"large": [4]}, "no larger layout": {"large": [2, 5], "small": [2]}, "switched off": {}}
    assert not takes_over(growing, 2 if why == "not larger" else 4, layouts.get(why, {"large": [2, 4], "small": [2]}))


@pytest.mark.parametrize("lately", [False, True])
def test_larger_requests_wait_on_in_the_queue(growing: Run, tmp_path: Path, lately: bool) -> None:
    """Not before the run may grow again."""
    now = time.time()
    if lately:
        write_growth(growing, GrowthRecord(1, now - 600, 3, "8_0"))
    give_back(growing, "8_0.0")
    done = begin(growing, tmp_path, "8", "large=4", "small=2")
    assert done.returncode == 0, done.stderr
    start = f" StartTime={datetime.fromtimestamp(now + 3000).isoformat(timespec='seconds')}" if lately else ""
    assert (tmp_path / "called").read_text() == f"scontrol update JobId=7_0 Dependency={start}\n"
    give_back(growing, "8_0.0")
    begin(growing, tmp_path, "7", "large=4", "small=2")
    assert (tmp_path / "called").read_text().endswith("scontrol update JobId=8_0 Dependency=afterany:7_0\n")


def test_an_attempt_on_fewer_nodes_of_the_same_job_lets_larger_requests_start(growing: Run, tmp_path: Path) -> None:
    """On two nodes none was larger; then a node was lost."""
    open_attempt(growing, "8_0.0", ["n1", "n2"])
    report_outcome(growing, 1, "failed", "nothing was heard of n2", "agent-0")
    for nodes, after in (("2", "afterany:8_0"), ("1", "")):
        lost = {"SLURM_JOB_NUM_NODES": nodes} | ({"HPCRL_ATTEMPTS_HERE": "1"} if nodes == "1" else {})
        done = begin(growing, tmp_path, "8", "large=2", "small=1,2", **lost)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "called").read_text().splitlines()[-1] == f"scontrol update JobId=7_0 Dependency={after}"
    assert read_claim(growing) == RunClaim(1, "8_0.0"), "the start has the run already"


@pytest.mark.parametrize(
    ("ago", "large", "returned"),
    [(600, "4", []), (None, "2,8", []), (None, "4,8", ["n3", "n4"])],
    ids=["too soon", "too few nodes", "as many nodes as gained nothing"],
)
def test_a_larger_request_comes_back_when_the_run_may_grow(
    growing: Run, tmp_path: Path, ago: int | None, large: str, returned: list[str]
) -> None:
    """It does not wait for the end of the smaller one."""
    train(growing, 12, total=212, returned=returned)
    now = time.time()
    if ago is not None:
        write_growth(growing, GrowthRecord(1, now - ago, 3, "8_0"))
    write_json(tmp_path / "elements.json", [str(growing.path)])
    nodes = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_NUM_NODES": "4"}
    words = [
        sys.executable,
        "-m",
        "hpcrl.launch.requeue.prologue",
        str(tmp_path / "elements.json"),
        f"large={large}",
        "small=2",
    ]
    with subprocess.Popen(words, env={**os.environ, **nodes}, stdout=subprocess.DEVNULL) as process:
        called, deadline = tmp_path / "called", time.monotonic() + 600
        while (not called.exists() or called.read_text().count("\n") < 2) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.kill()
    requeued, updated = called.read_text().splitlines()
    assert requeued == "scontrol requeue 7_0"
    assert updated.startswith("scontrol update JobId=7_0 StartTime="), "no dependency"
    start = datetime.fromisoformat(updated.rpartition("=")[2]).timestamp()
    assert now - 1 <= start - 3600 + (ago or 0) <= time.time()


def test_a_damaged_record_of_growth_ends_no_job(growing: Run, tmp_path: Path) -> None:
    growing.growth.parent.mkdir(exist_ok=True)
    growing.growth.write_text("{garb")
    give_back(growing, "8_0.0")
    done = begin(growing, tmp_path, "8", "large=4", "small=2")
    assert (done.returncode, "when the run grew last is not known" in done.stdout) == (0, True), done


def test_a_run_that_never_resumes_has_one_start(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm would refuse to requeue a job that was submitted with --no-requeue."""
    write_text(run.config, CONFIG.replace("latest", "none"))
    called = slurm(tmp_path, monkeypatch, _7_0="RUNNING", _8_0="RUNNING")
    assert take(run, "7_0.0") is None
    assert begin(run, tmp_path, "8").returncode == NOTHING_TO_DO
    assert not called.exists()
    open_attempt(run, "7_0.0", ["n1"])
    slurm(tmp_path, monkeypatch, _8_0="RUNNING")
    assert begin(run, tmp_path, "8").returncode == NOTHING_TO_DO, "its one attempt was lost"


def test_jobs_of_a_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = slurm(tmp_path, monkeypatch)
    assert recorded_requests(run) == {"large": "7_0", "small": "8_0"}
    assert (other_jobs(run, "7_0"), other_jobs(run, "9_0")) == (["8_0"], [])
    cancel_others(run, "8_0")
    assert called.read_text() == "scancel 7_0\n"
    record = json.loads(run.submission.read_text())
    del record["requests"]
    write_json(run.submission, record)
    assert (recorded_requests(run), other_jobs(run, "7_0")) == ({"": "7_0"}, [])
    run.submission.write_text("{")
    assert (recorded_requests(run), other_jobs(run, "7_0")) == ({}, []), "damaged"
