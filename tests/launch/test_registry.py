"""The state of a run from its files and from what Slurm says; a stand-in for squeue prints what the real one would."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch import lookout as lookout_module
from hpcrl.launch import registry, scheduler, stop
from hpcrl.launch.lookout import Lookout
from hpcrl.launch.registry import all_runs, find_run, known_states, states_of
from hpcrl.launch.requeue import requeue
from hpcrl.launch.stacks import stacks
from hpcrl.launch.state import RunState
from hpcrl.launch.stop import cancel
from hpcrl.run.commit import committed_directory, write_json, write_text
from hpcrl.run.layout import Run
from hpcrl.run.lease import LeaseWriter
from hpcrl.run.ledger import cancel_outcome, open_attempt, report_outcome

CONFIG = """\
[trainer]
resume_mode = "latest"
[slurm]
crash_budget = 2
[generator.inference_engine]
num_engines = 2
"""
PAST, FUTURE = "2020-01-01T10:00:00", "2099-01-01T10:00:00"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "runs" / "project" / "mine")
    write_text(run.config, CONFIG)
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


def squeue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *lines: str, complaint: str = "") -> None:
    """Put a squeue on PATH that prints these lines, or fails, and counts its calls in `asked`."""
    printed = tmp_path / "printed"
    printed.write_text("".join(f"{line}\n" for line in lines))
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir(exist_ok=True)
    end = f"echo '{complaint}' >&2; exit 1" if complaint else f"cat {printed}"
    program.write_text(f"#!/bin/sh\necho >> {tmp_path}/asked\n{end}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(registry, "PATIENCE_S", 0.0)


def committed_step(run: Run, step: int) -> None:
    with committed_directory(run.checkpoint(step), 1) as directory:
        (directory / "state").write_text("x")


def state(run: Run) -> RunState:
    return states_of([run])[0]


def test_states_through_the_life_of_a_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    squeue(monkeypatch, tmp_path, "7|PENDING|N/A|Priority|")
    assert (state(run).word, state(run).detail) == ("pending", "Priority: jobs with a higher priority come first")
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    assert state(run).word == "starting"
    open_attempt(run, "7.0", ["n1"])
    assert state(run).word == "running"
    report_outcome(run, 1, "failed", "trainer-0: ValueError", "agent-0")
    assert (state(run).word, state(run).detail) == ("ending", "failed: trainer-0: ValueError")
    squeue(monkeypatch, tmp_path, f"8|RUNNING|{PAST}|None|")
    assert (state(run).word, state(run).over) == ("failed", True)
    submitted(run, "9")
    squeue(monkeypatch, tmp_path, "9|PENDING|N/A|Resources|")
    assert (state(run).word, state(run).over) == ("pending", False)
    squeue(monkeypatch, tmp_path, f"9|RUNNING|{PAST}|None|")
    open_attempt(run, "9.0", ["n1"])
    assert state(run).word == "running", "whatever the clocks of the nodes say"
    squeue(monkeypatch, tmp_path)
    assert state(run).word == "lost"
    open_attempt(run, "9.1", ["n1"])
    report_outcome(run, 3, "done", "finished", "agent-0")
    assert state(run).word == "done"


def test_preempted_run_waits_and_starts_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    squeue(monkeypatch, tmp_path, f"7|PENDING|{FUTURE}|BeginTime|")
    detail = state(run).detail
    assert state(run).word == "preempted"
    assert "nothing was committed yet; BeginTime: Slurm lets it wait a while; may start at 2" in detail
    committed_step(run, 4)
    assert "goes on from s000004" in state(run).detail
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{FUTURE}|None|")
    assert state(run).word == "starting", "the job started after the outcome: that is of the attempt before"


def test_job_that_restarts_after_a_death_without_a_word_is_starting(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node failed, or there was no grace time: the last attempt has no outcome, and nobody who would hear a request."""
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    LeaseWriter(run, "trainer", 1).say("step 41/50", step=41, total=50)
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{FUTURE}|None|")
    assert state(run).word == "running", "the clocks are wrong, but somebody was heard of just now"
    os.utime(run.lease("trainer"), (time.time() - 100, time.time() - 100))
    assert (state(run).word, state(run).detail) == ("starting", "its job runs, its agents have not begun")
    with pytest.raises(RunError, match="try again in a moment"):
        requeue(run)
    with pytest.raises(RunError, match="no processes"):
        stacks(run)
    told = scancel(tmp_path)
    assert (cancel(run, 60.0).word, told.read_text()) == ("cancelled", "7\n")
    assert not run.stop.exists()


def test_crash_that_was_queued_again_says_how_often(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "failed", "trainer-0: ValueError", "agent-0", "n1")
    squeue(monkeypatch, tmp_path, "7|PENDING|N/A|Priority|")
    assert state(run).word == "pending"
    assert (
        "queued again after crash 1 of 2 without a new checkpoint (step 0): trainer-0: ValueError" in state(run).detail
    )
    open_attempt(run, "7.1", ["n1"])
    report_outcome(run, 2, "hang", "trainer-0 has made no progress", "agent-0", "n1")
    squeue(monkeypatch, tmp_path, f"7|FAILED|{PAST}|None|")
    held = state(run)
    assert (held.word, held.over) == ("held", True)
    assert "crash 2 of 2" in held.detail
    assert "hpcrl resume mine" in held.advice


def test_interrupted_run_that_is_not_queued_again_says_why(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    squeue(monkeypatch, tmp_path)
    assert (state(run).word, state(run).detail) == ("interrupted", "saved and stopped")
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
        (f"7|PENDING|{FUTURE}|Resources|", "preempted", "Slurm expects it to start at 2"),
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
    squeue(monkeypatch, tmp_path, line)
    assert state(run).word == word
    assert text in state(run).detail


def test_running_says_how_far(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    assert "starting · replicas 0/2" in state(run).detail
    LeaseWriter(run, "trainer", 1).say("step 12/40", step=12, total=40, seconds_per_step=3.0)
    LeaseWriter(run, "rollout-0", 1).say("generating", version=11)
    LeaseWriter(run, "rollout-1", 1).say("starting engine")
    committed_step(run, 10)
    os.utime(run.checkpoint(10) / "COMMIT", (time.time() - 200, time.time() - 200))
    assert state(run).detail == "step 12/40 · 3.0 s/step · ETA 1:27 · replicas 1/2 · last commit 3:20 ago (s000010)"
    LeaseWriter(run, "trainer", 1).say("saving", step=12, total=40)
    assert state(run).word == "saving"
    LeaseWriter(run, "trainer", 1).say("waiting for batch", step=12)
    write_json(run.stop, {"attempt": 1, "reason": "cancelled"})
    assert (state(run).word, state(run).detail.startswith("asked to stop (cancelled)")) == ("saving", True)
    for path in run.endpoints.iterdir():
        os.utime(path, (time.time() - 500, time.time() - 500))
    assert state(run).detail.endswith("replicas 0/2 · last commit 3:20 ago (s000010) · silent for 8:20")


def test_many_runs_cost_one_squeue(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [Run(run.path.with_name(f"other{i}")) for i in range(20)]
    for number, one in enumerate([run, *others]):
        write_text(one.config, CONFIG)
        submitted(one, f"7_{number}")
    squeue(monkeypatch, tmp_path, *(f"7_{number}|PENDING|N/A|Priority|" for number in range(21)))
    assert [one.word for one in states_of([run, *others])] == ["pending"] * 21
    assert (tmp_path / "asked").read_text() == "\n"


def test_who_waits_for_a_run_asks_slurm_seldom(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    lookout = Lookout(run, states_of)

    def asked(looks: int) -> int:
        before = len((tmp_path / "asked").read_text()) if (tmp_path / "asked").exists() else 0
        for _ in range(looks):
            lookout.look()
        return len((tmp_path / "asked").read_text()) - before

    assert asked(5) == 1
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    assert (asked(5), lookout.look().word) == (1, "ending"), "once when there is an outcome"
    monkeypatch.setattr(lookout_module, "_LEAVING_S", 0.0)
    squeue(monkeypatch, tmp_path, f"7|PENDING|{FUTURE}|BeginTime|")
    assert (asked(5), lookout.look().word) == (1, "preempted"), "often while the job leaves, and seldom in the queue"
    monkeypatch.setattr(lookout_module, "_ASK_S", 0.0)
    squeue(monkeypatch, tmp_path, f"7|CANCELLED|{PAST}|None|")
    assert lookout.over()


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


def test_stacks_of_an_attempt_that_has_written_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    with pytest.raises(RunError, match="no process of mine has shown its stacks"):
        stacks(run, 0.3)


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


def test_array_that_was_cancelled_before_it_began(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run, "7_3")
    squeue(monkeypatch, tmp_path, f"7|CANCELLED|{PAST}|None|")
    assert state(run).word == "cancelled"
    squeue(monkeypatch, tmp_path, "7|PENDING|N/A|Priority|")
    assert state(run).word == "lost", "this element is no longer among those that wait"


def test_cancelled_in_the_queue(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_attempt(run, "7.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    submitted(run, "8", at=1.0)
    squeue(monkeypatch, tmp_path)
    cancel_outcome(run, 1)
    assert state(run).word == "cancelled"


def test_held_run_is_cancelled_without_slurm_being_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    for number in (1, 2):
        open_attempt(run, f"7.{number - 1}", ["n1"])
        report_outcome(run, number, "failed", "trainer-0: ValueError", "agent-0")
    squeue(monkeypatch, tmp_path)
    assert state(run).word == "held"
    assert cancel(run, 0.0).word == "cancelled"
    with pytest.raises(RunError, match="is not running: cancelled"):
        cancel(run, 0.0)


def scancel(tmp_path: Path) -> Path:
    """Put a scancel beside the squeue, which forgets the job; return where it writes what it was told."""
    program = tmp_path / "bin" / "scancel"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\n: > {tmp_path}/printed\n')
    program.chmod(0o755)
    return tmp_path / "cancelled"


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
    assert state(run).word == "preempted"
    began = time.monotonic()
    ended = cancel(run, patience_s)
    assert time.monotonic() - began < 10
    assert (ended.word, ended.over, told.read_text()) == ("cancelled", True, "7\n")
    assert not run.stop.exists(), "the next attempt of a resumed run must not read it"


def test_running_run_is_asked_and_taken_away_only_now(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    told = scancel(tmp_path)
    asked = cancel(run, 1.0)
    assert (asked.word, asked.over) == ("saving", False)
    assert json.loads(run.stop.read_text()) == {"attempt": 1, "reason": "cancelled"}
    assert not told.exists(), "what saves goes on saving"
    assert (cancel(run, 0.0).word, told.read_text()) == ("cancelled", "7\n")


def script_of(folder: Path, runs: list[Run]) -> Path:
    """Write what submitit and hpcrl leave of a submission whose client died right after sbatch."""
    elements = folder / "elements.json"
    write_json(elements, [str(run.path) for run in runs])
    script = folder / ".submission_file_0.sh"
    script.write_text(f"#!/bin/bash\nsrun something\n'/bin/python3' -m hpcrl.launch.finish '{elements}'; exit $?")
    for run in runs:
        run.slurm.symlink_to(os.path.relpath(folder, run.path))
    return script


def test_job_that_nobody_recorded_is_found_in_the_queue(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Run(run.path.with_name("other"))
    write_text(other.config, CONFIG)
    script = script_of(tmp_path / "runs" / "project" / ".slurm" / "sweep", [other, run])
    strange = "9_1|RUNNING|N/A|None|/elsewhere/.slurm/sweep/.submission_file_1.sh"
    squeue(monkeypatch, tmp_path, f"8_0|PENDING|N/A|Priority|{script}", f"8_1|PENDING|N/A|Priority|{script}", strange)
    found = state(run)
    assert (found.word, found.found, found.submission["job_id"]) == ("pending", True, "8_1")
    again = state(run)
    assert (again.found, again.submission["job_id"]) == (False, "8_1"), "it was recorded"
    assert not other.submission.exists()
    assert state(other).submission["job_id"] == "8_0"


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
    assert (state(run).word, state(run).submission["job_id"]) == ("starting", "8_0")
    assert json.loads(run.submission.read_text())["overrides"] == ["trainer.seed=1"]
    squeue(monkeypatch, tmp_path, f"5_0|PENDING|N/A|Priority|{script}", line)
    submitted(run, "5_0")
    assert state(run).submission["job_id"] == "5_0", "the recorded one is alive"


def test_without_an_answer_of_slurm_the_files_speak(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    squeue(
        monkeypatch, tmp_path, complaint="slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    )
    (silent,) = known_states([run])
    assert (silent.word, silent.over) == ("unknown", False)
    assert "no attempt has begun; squeue: slurm_load_jobs error: Unable to contact" in silent.detail
    open_attempt(run, "7.0", ["n1"])
    LeaseWriter(run, "trainer", 1).say("step 2/4", step=2, total=4)
    (running,) = known_states([run])
    assert (running.word, running.detail.startswith("step 2/4 · ")) == ("running", True)
    assert "Unable to contact" in running.detail
    os.utime(run.lease("trainer"), (time.time() - 500, time.time() - 500))
    assert known_states([run])[0].word == "unknown"
    report_outcome(run, 1, "done", "finished", "agent-0")
    assert (known_states([run])[0].word, known_states([run])[0].over) == ("done", True)


def test_slurmctld_that_is_away_for_a_moment_is_waited_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(run)
    squeue(monkeypatch, tmp_path, complaint="Unable to contact slurm controller (connect failure)")
    monkeypatch.setattr(registry, "PATIENCE_S", 30.0)
    monkeypatch.setattr(scheduler, "_RETRY_S", 0.0)
    program = tmp_path / "bin" / "squeue"
    text = program.read_text().replace(
        "#!/bin/sh\n", f"#!/bin/sh\n[ $(wc -l < {tmp_path}/asked) -ge 2 ] && exec echo '7|PENDING|N/A|Priority|'\n"
    )
    (tmp_path / "asked").touch()
    program.write_text(text)
    assert state(run).word == "pending"
    assert capsys.readouterr().err.count("asking again for 30 s") == 1


@pytest.mark.parametrize("status", [0, 1])
def test_slurm_that_does_not_answer_makes_no_run_pass_for_gone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    submitted(run)
    if status:
        squeue(monkeypatch, tmp_path, complaint="Unable to contact slurm controller")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="Unable to contact slurm controller" if status else "squeue was not found"):
        state(run)


def test_local_run_is_asked_for_on_its_host(run: Run) -> None:
    submitted(run, "1", "local", host="elsewhere")
    with pytest.raises(RunError, match="on elsewhere; ask there"):
        state(run)
    assert known_states([run])[0].word == "unknown", "and a list of runs goes on"
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
