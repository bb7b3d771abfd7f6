"""The end of the batch script, with a stand-in for scontrol that notes how it was called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import RunError
from hpcrl.launch.requeue.epilogue import concluded, ended_before, nodes_left, settle
from hpcrl.launch.requeue.requeue import ATTEMPTS_HERE, HERE, LEAST_NODES, claimed_start, start_name
from hpcrl.rundir.allocations import read_allocations
from hpcrl.rundir.claims import RunClaim, claim, read_claim
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.growth import GrowthRecord, write_growth
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Kind, job_of, open_attempt, read_attempts, read_outcome, report_outcome
from hpcrl.runtime.process_status import ENDED, StatusWriter
from hpcrl.runtime.signals import ask_to_stop
from tests.paths import QUICKSTART


def start_finish(
    tmp_path: Path, resume_mode: str, kind: Kind, also: Callable[[Path], None] = lambda _: None
) -> subprocess.Popen[str]:
    run = Run(tmp_path / "run")
    write_text(run.config, Config.from_toml([QUICKSTART], [f"trainer.resume_mode={resume_mode}"]).to_toml())
    open_attempt(run, "7_0.0", ["n1"])
    report_outcome(run, 1, kind, "saved and stopped", "agent-0")
    write_json(tmp_path / "elements.json", [str(run.path)])
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\neval "$BEFORE_SCONTROL"\necho "$@" >> {tmp_path}/called\n')
    program.chmod(0o755)
    also(tmp_path)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "hpcrl.launch.requeue.epilogue", str(tmp_path / "elements.json"), "0"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_of(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    write_text(run.config, Config.from_toml([QUICKSTART]).to_toml())
    return run


@pytest.mark.parametrize(
    ("status", "kind"), [(143, "interrupted"), (140, "interrupted"), (1, "failed"), (137, "failed")]
)
def test_agents_that_ended_before_they_began(tmp_path: Path, status: int, kind: Kind) -> None:
    """SIGTERM and SIGUSR2 are Slurm's, also to a process that has not come so far as to listen."""
    outcome = concluded(run_of(tmp_path), "7_0.0", status)
    assert (outcome.attempt, outcome.kind) == (1, kind)


def test_an_attempt_that_was_told_to_leave_and_killed_is_no_crash(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    open_attempt(run, "7_0.0", ["n1"])
    ask_to_stop(run, 1, "interrupted")
    assert concluded(run, "7_0.0", 137).kind == "interrupted"


def test_cancel_wins_over_whatever_else_ends_the_attempt(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    open_attempt(run, "7_0.0", ["n1"])
    ask_to_stop(run, 1, "cancelled")
    report_outcome(run, 1, "hang", "rank-0 has made no progress", "agent-0")
    assert concluded(run, "7_0.0", 1).kind == "cancelled"


def test_cancel_wins_over_a_requeue_by_slurm(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    open_attempt(run, "7_0.0", ["n1"])
    ask_to_stop(run, 1, "cancelled")
    assert ended_before(run, "7_0.0") is None, "the attempt itself still runs"
    assert ended_before(run, "9_0.0") is None, "a person has resumed it"
    before = ended_before(run, "7_0.1")
    assert before is not None
    assert before.kind == "cancelled"


def test_a_start_that_finds_no_list_of_attempts_is_not_over_by_an_old_outcome(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    open_attempt(run, "7_0.0", ["n1"])
    report_outcome(run, 1, "cancelled", "cancelled by the user", "agent-0")
    run.attempts.unlink()
    with pytest.raises(RunError, match="does not know attempt 1"):
        ended_before(run, "9_0.0")


def test_interrupted_run_is_requeued_and_the_script_waits_to_be_ended(tmp_path: Path) -> None:
    with start_finish(tmp_path, "latest", "interrupted") as process:
        deadline = time.monotonic() + 60
        said = ""
        while said.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            said = (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""
        assert said == "requeue 7_0\nupdate JobId=7_0 StartTime=now+2\n"
        process.terminate()  # Slurm ends the script with the job; a moment too early must do no harm
        time.sleep(0.5)
        assert process.poll() is None
        process.kill()


def _called(tmp_path: Path) -> str:
    return (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""


def two_requests(tmp_path: Path) -> None:
    """Let the run of `start_finish` have a second request, of job 8_0, and note how scancel is called."""
    run = Run(tmp_path / "run")
    write_json(run.submission, {"job_id": "7_0", "requests": {"large": "7_0", "small": "8_0"}})
    claim(run, "7_0.0", RunClaim(0, None))
    program = tmp_path / "bin" / "scancel"
    program.write_text(f'#!/bin/sh\necho "scancel $@" >> {tmp_path}/called\n')
    program.chmod(0o755)


def test_other_requests_may_start_once_a_run_is_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is given back before: the other job may start at once."""
    monkeypatch.setenv("BEFORE_SCONTROL", f"[ $1 = requeue ] && cp -r {tmp_path}/run/claims {tmp_path}/then")
    with start_finish(tmp_path, "latest", "interrupted", also=two_requests) as process:
        deadline = time.monotonic() + 60
        while "now+2" not in (said := _called(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        called = "requeue 7_0\nupdate JobId=8_0 Dependency=\nupdate JobId=7_0 StartTime=now+2\n"
        assert said == called
        assert len(list((tmp_path / "then").iterdir())) == 2
        assert read_claim(Run(tmp_path / "run")) == RunClaim(2, None)
        process.kill()


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_job_waits_for_the_larger_one_that_takes_its_run_over(tmp_path: Path, state: str) -> None:
    """Not for one that has given that up: it waits for this job's end, and both would wait for ever."""

    def growing(place: Path) -> None:
        two_requests(place)
        write_growth(Run(place / "run"), GrowthRecord(1, 0.0, 5, "8_0"))
        (place / "bin" / "squeue").write_text(f"#!/bin/sh\necho '8_0|{state}|N/A|None|'\n")
        (place / "bin" / "squeue").chmod(0o755)

    with start_finish(tmp_path, "latest", "interrupted", also=growing) as process:
        taken_over = ["update JobId=7_0 StartTime=now+2minutes", "update JobId=7_0 Dependency=afterany:8_0"]
        usual = ["update JobId=8_0 Dependency=", "update JobId=7_0 StartTime=now+2"]
        deadline = time.monotonic() + 60
        while _called(tmp_path).count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _called(tmp_path).splitlines() == ["requeue 7_0", *(taken_over if state == "RUNNING" else usual)]
        process.kill()


def test_a_request_that_waits_until_the_run_may_grow_may_start_once_the_run_has_no_nodes(tmp_path: Path) -> None:
    def delayed(place: Path) -> None:
        two_requests(place)
        (place / "bin" / "squeue").write_text("#!/bin/sh\necho '8_0|PENDING|2026-01-01T00:00:00|BeginTime|'\n")
        (place / "bin" / "squeue").chmod(0o755)

    with start_finish(tmp_path, "latest", "interrupted", also=delayed) as process:
        deadline = time.monotonic() + 60
        while _called(tmp_path).count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        freed = "update JobId=8_0 Dependency= StartTime=now"
        assert _called(tmp_path) == f"requeue 7_0\n{freed}\nupdate JobId=7_0 StartTime=now+2\n"
        process.kill()


def test_smaller_requests_wait_where_the_same_job_grows(tmp_path: Path) -> None:
    def growing(place: Path) -> None:
        two_requests(place)
        write_growth(Run(place / "run"), GrowthRecord(1, 0.0, 5, "7_0"))

    with start_finish(tmp_path, "latest", "interrupted", also=growing) as process:
        deadline = time.monotonic() + 60
        while _called(tmp_path).count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        freed = "update JobId=8_0 Dependency= StartTime=now+2minutes"
        assert _called(tmp_path) == f"requeue 7_0\n{freed}\nupdate JobId=7_0 StartTime=now+2\n"
        process.kill()


@pytest.mark.parametrize(
    ("kind", "nodes", "hours", "here"),
    [("failed", "2", 1, True), ("hang", "3 3 2", 1, True), ("failed", "3 3", 1, False), ("failed", "1", 1, False), ("failed", "2", 0, False)],
)  # fmt: skip
def test_an_attempt_that_lost_a_node_is_followed_by_another_one_in_the_same_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, nodes: str, hours: int, here: bool
) -> None:
    """Not where no node is gone, where fewer are left than the two of the smallest layout, or within minutes of the time limit.

    Slurm may notice the loss later than the agents do: then it is asked again, unless the agents of all nodes have ended by themselves.
    """
    run = run_of(tmp_path)
    open_attempt(run, "7_0.0", ["n1", "n2"], {}, ["n3"])
    report_outcome(run, 1, kind, "nothing was heard of n2", "agent-0")
    answers = tmp_path / "answers"
    answers.write_text("\n".join(nodes.split()) + "\n")
    lines = {
        "squeue": f"case $* in *%D*) head -1 {answers}; [ $(wc -l < {answers}) -gt 1 ] && sed -i 1d {answers};; "
        f"*) date -d '+{hours} hours +4 minutes' +%FT%T;; esac; true",
        "scontrol": "echo 'SlurmdTimeout           = 30 sec'",
    }
    for name, line in lines.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    StatusWriter(run, "agent-1", 1).write(ENDED if nodes == "3 3" else "watching")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(LEAST_NODES, "2")
    if here:
        assert settle(run, "7_0.0", here=True) == HERE
        (allocation,) = read_allocations(run)
        assert allocation.over
    else:
        assert nodes_left(run, "7_0.0") == 0
    monkeypatch.delenv(LEAST_NODES)
    assert nodes_left(run, "7_0.0") == 0, "of a run without ranges"


@pytest.mark.parametrize(
    ("nodes", "least", "hours", "attempt", "here"),
    [(2, 2, 1, 1, True), (5, 2, 1, 1, False), (2, 3, 1, 1, False), (2, 2, 0, 1, False), (2, 2, 1, 2, False)],
    ids=["other roles", "more nodes", "a lost node", "its time is over", "of an earlier attempt"],
)
def test_an_attempt_that_gives_its_nodes_other_roles_is_followed_by_another_one_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, least: int, hours: int, attempt: int, here: bool
) -> None:
    run = run_of(tmp_path)
    for number in range(1, attempt + 1):
        open_attempt(run, f"7_0.{number - 1}", ["n1", "n2"])
    report_outcome(run, attempt, "interrupted", "saved and stopped", "agent-0")
    write_growth(run, GrowthRecord(1, 0.0, nodes, "7_0"))
    (tmp_path / "squeue").write_text(
        f"#!/bin/sh\ncase $* in *%D*) echo 2;; *) date -d '+{hours} hours +4 minutes' +%FT%T;; esac\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(LEAST_NODES, str(least))
    start = f"7_0.{attempt - 1}"
    if here:
        assert settle(run, start, here=True) == HERE
    assert nodes_left(run, start, moves=True) == (2 if here else 0)


def test_on_the_fewest_nodes_no_lost_one_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lost_node(tmp_path, monkeypatch, "exit 1", 600)
    monkeypatch.setenv(LEAST_NODES, "2")
    assert nodes_left(run, "7_0.0") == 0
    assert not (tmp_path / "asked").exists()


def lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, timeout_s: int) -> Run:
    """Return a run whose attempt on two nodes failed, under a batch script that could start another one on a single node."""
    run = run_of(tmp_path)
    open_attempt(run, "7_0.0", ["n1", "n2"])
    report_outcome(run, 1, "failed", "nothing was heard of n2", "agent-0")
    for name, line in {"squeue": squeue, "scontrol": f"echo 'SlurmdTimeout = {timeout_s} sec'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/asked\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(LEAST_NODES, "1")
    return run


def test_a_lost_node_is_not_waited_for_beyond_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two times slurm.signal_seconds are left to the requeue; Slurm here counts a silent node as down after an hour only."""
    signal_s = Config.from_toml([QUICKSTART]).slurm.signal_seconds
    squeue = f"case $* in *%D*) echo 2;; *) date -d '+{2 * signal_s + 3} seconds' +%FT%T;; esac"
    run, began = lost_node(tmp_path, monkeypatch, squeue, 3600), time.monotonic()
    assert nodes_left(run, "7_0.0") == 0
    assert time.monotonic() - began < 60
    (tmp_path / "squeue").write_text(
        f"#!/bin/sh\necho $@ >> {tmp_path}/asked\ndate -d '+{2 * signal_s - 3} seconds' +%FT%T\n"
    )
    (tmp_path / "asked").unlink()
    assert nodes_left(run, "7_0.0") == 0
    assert "%D" not in (tmp_path / "asked").read_text(), "too late to begin to wait"


def test_a_run_that_is_cancelled_while_a_lost_node_is_waited_for_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = json.dumps({"attempt": 1, "reason": "cancelled"})
    squeue = f"case $* in *%D*) sleep 1; echo '{request}' > {tmp_path}/run/control/stop.json; echo 1;; *) date -d '+9 hours' +%FT%T;; esac"
    run = lost_node(tmp_path, monkeypatch, squeue, 30)
    run.stop.parent.mkdir(parents=True)
    began = time.time()
    assert settle(run, "7_0.0", here=True) == 0
    assert (outcome := read_outcome(run))
    assert outcome.kind == "cancelled"
    (allocation,) = read_allocations(run)
    assert allocation.until >= began + 1, "its nodes were held meanwhile"


def test_each_attempt_of_an_allocation_has_a_start_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ARRAY_JOB_ID", "7"), ("ARRAY_TASK_ID", "0"), ("RESTART_COUNT", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert start_name() == "7_0.2"
    monkeypatch.setenv(ATTEMPTS_HERE, "1")
    assert start_name() == "7_0.2+1"
    assert (job_of("7_0.2+1"), claimed_start("7_0.2+1")) == ("7_0", "7_0.2")


def test_other_requests_are_cancelled_when_a_run_is_over(tmp_path: Path) -> None:
    with start_finish(tmp_path, "latest", "done", also=two_requests) as process:
        assert process.wait(60) == 0
    assert (tmp_path / "called").read_text() == "scancel 8_0\n"


def test_requeue_is_asked_for_until_slurmctld_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words that scontrol of Slurm 22.05 has for an element of an array."""
    away = f"[ -e {tmp_path}/back ] || {{ touch {tmp_path}/back; echo 'Unexpected message received for job 7_0' >&2; exit 1; }}"
    monkeypatch.setenv("BEFORE_SCONTROL", away)
    with start_finish(tmp_path, "latest", "interrupted") as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "called").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (tmp_path / "called").read_text().startswith("requeue 7_0\n")
        assert (tmp_path / "back").exists()
        process.kill()


def test_a_batch_script_that_somebody_gave_to_sbatch_leaves_the_run_alone(tmp_path: Path) -> None:
    """Its agents find nothing to start with; the run goes on, or was done, under its own job."""
    run = run_of(tmp_path)
    write_json(run.submission, {"job_id": "7_0"})
    write_json(tmp_path / "elements.json", [str(run.path)])
    environment = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "0"}
    command = [sys.executable, "-m", "hpcrl.launch.requeue.epilogue", str(tmp_path / "elements.json"), "1"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "job 9_0 is none of run" in done.stdout
    assert read_attempts(run) == []
    assert read_outcome(run) is None


def test_a_job_of_a_submission_that_was_killed_is_the_runs(tmp_path: Path) -> None:
    """Its agents find nothing to start with either, and no command may have recorded it."""
    run = run_of(tmp_path)
    write_text(run.config, Config.from_toml([QUICKSTART], ["trainer.resume_mode=none"]).to_toml())
    write_json(tmp_path / "elements.json", [str(run.path)])
    environment = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "0"}
    command = [sys.executable, "-m", "hpcrl.launch.requeue.epilogue", str(tmp_path / "elements.json"), "1"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    outcome = read_outcome(run)
    assert outcome is not None, done.stdout
    assert (outcome.kind, outcome.message) == ("failed", "the agents ended before they began")


@pytest.mark.parametrize(
    ("resume_mode", "kind", "code"),
    [("none", "interrupted", 1), ("none", "done", 0), ("latest", "done", 0), ("none", "failed", 1)],
)
def test_nothing_else_is_requeued(tmp_path: Path, resume_mode: str, kind: Kind, code: int) -> None:
    with start_finish(tmp_path, resume_mode, kind) as process:
        said, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert not (tmp_path / "called").exists()
    assert ("not requeued, because trainer.resume_mode is none" in said) == (kind in ("interrupted", "failed"))
