"""Runs are found by name, and their states asked for together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch import scheduler
from hpcrl.launch.attach.stacks import stacks
from hpcrl.launch.manage import poll as poll_module
from hpcrl.launch.manage import registry
from hpcrl.launch.manage.poll import RunPoller
from hpcrl.launch.manage.registry import all_runs, find_run, known_states, states_of
from hpcrl.launch.manage.screen import RunView, details
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.runtime.process_status import StatusWriter
from tests.launch.manage.slurm_records import (
    CONFIG,
    FUTURE,
    PAST,
    squeue,
    state,
    submitted,
)


def test_many_runs_cost_one_squeue(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [Run(run.path.with_name(f"other{i}")) for i in range(20)]
    for number, one in enumerate([run, *others]):
        write_text(one.config, CONFIG)
        submitted(one, f"7_{number}")
    squeue(monkeypatch, tmp_path, *(f"7_{number}|PENDING|N/A|Priority|" for number in range(21)))
    assert [one.kind for one in states_of([run, *others])] == ["pending"] * 21
    assert (tmp_path / "asked").read_text() == "\n"


LARGE, SMALL = "7_0|{}|{}|{}|", "8_0|{}|{}|{}|"


@pytest.mark.parametrize(
    ("large", "small", "kind", "job"),
    [
        (("PENDING", "N/A", "Priority"), ("PENDING", "N/A", "Priority"), "pending", "7_0"),
        (("PENDING", "N/A", "JobHeldUser"), ("PENDING", "N/A", "Priority"), "pending", "8_0"),
        (("REQUEUE_HOLD", "N/A", "None"), ("PENDING", "N/A", "JobHeldAdmin"), "held", "7_0"),
        (("PENDING", "N/A", "Dependency"), ("RUNNING", PAST, "None"), "starting", "8_0"),
        (("RUNNING", PAST, "None"), ("PENDING", "N/A", "Dependency"), "starting", "7_0"),
        (None, ("PENDING", "N/A", "Priority"), "pending", "8_0"),
        (None, None, "lost", "7_0"),
    ],
)
def test_a_run_is_the_request_that_runs(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    large: tuple[str, ...] | None,
    small: tuple[str, ...] | None,
    kind: str,
    job: str,
) -> None:
    submitted(run, "7_0", requests={"large": "7_0", "small": "8_0"})
    lines = [line.format(*facts) for line, facts in ((LARGE, large), (SMALL, small)) if facts]
    squeue(monkeypatch, tmp_path, *lines)
    found = state(run)
    assert (found.kind, found.submission["job_id"], found.over) == (kind, job, not lines)
    rows = dict(details(RunView(run, found)))
    for name, number, facts in (("large", "7_0", large), ("small", "8_0", small)):
        assert rows[f"request {name}"].startswith(f"{number}, {facts[0].lower() if facts else 'gone'}")


def test_a_run_whose_request_was_preempted_waits_as_all_of_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run, "7_0", requests={"large": "7_0", "small": "8_0"})
    open_attempt(run, "8_0.0", ["n1"])
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    squeue(monkeypatch, tmp_path, "7_0|PENDING|N/A|Priority|", f"8_0|PENDING|{FUTURE}|BeginTime|")
    assert (state(run).kind, state(run).submission["job_id"]) == ("preempted", "8_0")
    squeue(monkeypatch, tmp_path, f"7_0|RUNNING|{FUTURE}|None|", f"8_0|PENDING|{FUTURE}|Dependency|")
    assert (state(run).kind, state(run).submission["job_id"]) == ("starting", "7_0")
    open_attempt(run, "7_0.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7_0|RUNNING|{PAST}|None|", f"8_0|PENDING|{FUTURE}|Dependency|")
    assert (state(run).kind, state(run).attempt) == ("running", 2)


def test_who_waits_for_a_run_asks_slurm_seldom(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    poller = RunPoller([run], states_of)

    def asked(looks: int) -> int:
        before = len((tmp_path / "asked").read_text()) if (tmp_path / "asked").exists() else 0
        for _ in range(looks):
            poller.states()
        return len((tmp_path / "asked").read_text()) - before

    assert asked(5) == 1
    report_outcome(run, 1, "interrupted", "saved and stopped", "agent-0")
    assert (asked(5), poller.states()[0].kind) == (1, "ending"), "once when there is an outcome"
    monkeypatch.setattr(poll_module, "_LEAVING_S", 0.0)
    squeue(monkeypatch, tmp_path, f"7|PENDING|{FUTURE}|BeginTime|")
    assert (asked(5), poller.states()[0].kind) == (1, "preempted"), (
        "often while the job leaves, and seldom in the queue"
    )
    monkeypatch.setattr(poll_module, "_ASK_S", 0.0)
    squeue(monkeypatch, tmp_path, f"7|CANCELLED|{PAST}|None|")
    assert poller.over()


def test_stacks_of_an_attempt_that_has_written_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    with pytest.raises(RunError, match="no process of mine has shown its stacks"):
        stacks(run, 0.3)


def test_without_an_answer_of_slurm_the_files_speak(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    squeue(
        monkeypatch, tmp_path, complaint="slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    )
    (silent,) = known_states([run])
    assert (silent.kind, silent.over) == ("unknown", False)
    assert "no attempt has begun; squeue: slurm_load_jobs error: Unable to contact" in silent.detail
    open_attempt(run, "7.0", ["n1"])
    StatusWriter(run, "trainer", 1).write("step 2/4", step=2, total=4)
    (running,) = known_states([run])
    assert (running.kind, running.detail.startswith("step 2/4 · ")) == ("running", True)
    assert "Unable to contact" in running.detail
    os.utime(run.status_file("trainer"), (time.time() - 500, time.time() - 500))
    assert known_states([run])[0].kind == "unknown"
    report_outcome(run, 1, "done", "finished", "agent-0")
    assert (known_states([run])[0].kind, known_states([run])[0].over) == ("done", True)


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
    assert state(run).kind == "pending"
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
    assert known_states([run])[0].kind == "unknown", "and a list of runs goes on"
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


NAN = '{"executor": "slurm", "host": "", "job_id": "7", "submitted": NaN}'


@pytest.mark.parametrize("content", ["", "{", "[]", '{"executor": "local"}', NAN])
def test_damaged_record_of_one_run_leaves_the_others_their_states(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    other = Run(run.path.with_name("other"))
    write_text(other.config, CONFIG)
    submitted(other)
    run.submission.write_text(content)
    squeue(monkeypatch, tmp_path, "7|PENDING|N/A|Priority|")
    damaged, whole = known_states([run, other])
    assert (damaged.kind, damaged.over, whole.kind) == ("unknown", False, "pending")
    assert f"{run.submission} is damaged" in damaged.detail
    with pytest.raises(SubmitError, match=r"submission\.json is damaged"):
        states_of([run])


def test_runs_are_found_in_any_project_but_not_beside_one(tmp_path: Path) -> None:
    for name in ("b/two", "b/one", "a/z", "a/.slurm", "a/no-run/deeper"):
        write_text(tmp_path / name / "config.toml", CONFIG)
    (tmp_path / "a" / "file").touch()
    (tmp_path / "c").symlink_to(tmp_path / "b")
    found = [(run.project, run.name) for run in all_runs(tmp_path)]
    assert found == [("a", "z"), ("b", "one"), ("b", "two"), ("c", "one"), ("c", "two")]
    assert all_runs(tmp_path / "nothing") == []


def test_no_run_of_another_user_keeps_the_list_from_its_end(run: Run) -> None:
    """Whoever may write below a root that people share can put a pipe there, which has no first byte, or a device, which has no last one."""
    names = (
        "config.toml",
        "submission.json",
        "attempts.jsonl",
        "alerts.jsonl",
        "outcomes/1.json",
        "metrics/trainer.jsonl",
    )
    submitted(run, executor="local")
    open_attempt(run, "local-7", ["n1"])
    for name in names:
        for kind in ("pipe", "device"):
            other = Run(run.path.with_name(f"{kind}-{name.replace('/', '-')}"))
            shutil.copytree(run.path, other.path)
            path = other.path / name
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    huge = Run(run.path.with_name("huge"))
    shutil.copytree(run.path, huge.path)
    os.truncate(huge.attempts, 1 << 40)
    command = [sys.executable, "-m", "hpcrl.cli.main", "status", "--root", str(run.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert listed.keys() == {f"project/{one.name}" for one in all_runs(run.root)}
    assert f"{huge.attempts} cannot be read: it is larger than 1 GiB" in listed["project/huge"]
    assert "attempts.jsonl cannot be read: it is no regular file" in listed["project/pipe-attempts.jsonl"]
