"""Runs while they go on: on a real terminal, in a pipe, and where Slurm or the filesystem hangs."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from hpcrl.launch.manage import screen
from hpcrl.launch.manage.follow import Looks, draws, follow
from hpcrl.launch.manage.screen import one_run
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.runtime.process_status import StatusWriter
from tests.jobs.small_run import HPCRL
from tests.launch.manage.slurm_records import CONFIG, PAST, squeue, submitted, trained


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """What a local run's job looks like to hpcrl, until its standard input ends."""
    command = [sys.executable, "-c", "input()", "submitit"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield process
        end(process)


def end(job: subprocess.Popen[bytes]) -> None:
    assert job.stdin
    job.stdin.close()
    job.wait()


@pytest.fixture
def going_on(run: Run, job: subprocess.Popen[bytes]) -> Run:
    submitted(run, str(job.pid), "local")
    open_attempt(run, f"local-{job.pid}", ["n1"])
    StatusWriter(run, "trainer", 1).write("step 7/10", step=7, total=10)
    trained(run, 6, 2.0)
    return run


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_in_a_pipe(going_on: Run, job: subprocess.Popen[bytes]) -> None:
    output = io.StringIO()
    thread = threading.Thread(target=follow, args=([going_on], Console(file=output, width=60)))
    thread.start()
    wait_for(lambda: "step 7/10 · 2.0 s/step · ETA 8 s" in output.getvalue())
    StatusWriter(going_on, "rollout-0", 1).write("starting [engine]")
    wait_for(lambda: "starting [engine]" in output.getvalue())
    StatusWriter(going_on, "trainer", 1).write("finished", step=10, total=10)
    report_outcome(going_on, 1, "done", "finished", "agent-0")
    wait_for(lambda: "run          ending: done: finished" in output.getvalue())
    end(job)
    thread.join()
    text = output.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert sum("step 7/10" in line for line in lines) == 1
    assert re.match(r"\d\d:\d\d:\d\d trainer +step 7/10 ", lines[0])
    assert "│ outcome │ done: finished" in text
    assert lines[-2:] == [
        f"run directory  {going_on.path}",
        f"curves         hpcrl tensorboard {going_on.path}",
    ]


def test_a_run_that_is_over_is_shown_at_once(
    going_on: Run, job: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    report_outcome(going_on, 1, "done", "finished", "agent-0")
    end(job)
    monkeypatch.setattr("hpcrl.launch.manage.follow.LOOK_S", 60.0)
    output, began = io.StringIO(), time.monotonic()
    follow([going_on], Console(file=output, width=60))
    assert time.monotonic() - began < 30
    assert "│ outcome │ done: finished" in output.getvalue()


def test_lines_of_a_sweep_name_their_runs(going_on: Run, job: subprocess.Popen[bytes]) -> None:
    other = Run(going_on.path.with_name("other"))
    write_text(other.config, CONFIG)
    submitted(other, "1", "local")
    open_attempt(other, "local-1", ["n1"])
    report_outcome(other, 1, "done", "finished", "agent-0")
    output = io.StringIO()
    thread = threading.Thread(target=follow, args=([going_on, other], Console(file=output, width=60)))
    thread.start()
    wait_for(lambda: " mine trainer " in output.getvalue())
    report_outcome(going_on, 1, "failed", "trainer-0: ValueError", "agent-0")
    end(job)
    thread.join()
    assert [line.split()[:2] for line in output.getvalue().splitlines()[-2:]] == [["mine", "failed"], ["other", "done"]]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, True), ({"TERM": "dumb"}, False), ({"TERM": "unknown"}, False), ({"NO_COLOR": "1"}, False)],
)
def test_where_a_screen_is_drawn(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert draws(Console(file=io.StringIO(), force_terminal=True)) is expected
    assert not draws(Console(file=io.StringIO()))


def resize(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.mark.parametrize("command", [["follow"], ["status", "--follow"]])
def test_a_screen_on_a_terminal_that_changes_its_size(
    going_on: Run, job: subprocess.Popen[bytes], command: list[str]
) -> None:
    terminal, slave = pty.openpty()
    resize(slave, 100, 30)
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    words = [HPCRL, *command, str(going_on.path)]
    shown: list[bytes] = []
    with subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env={**kept, "TERM": "xterm"}) as process:
        os.close(slave)
        reader = threading.Thread(target=lambda: shown.extend(iter(lambda: read(terminal), b"")))
        reader.start()
        wait_for(lambda: b"".join(shown).count(b"ETA 8 s") >= 2)
        assert b"directory   " in b"".join(shown)
        resize(terminal, 40, 6)
        before = len(shown)
        wait_for(lambda: b"".join(shown[before:]).count(b"ETA") >= 2)
        small = b"".join(shown[before:]).decode()
        report_outcome(going_on, 1, "done", "finished", "agent-0")
        end(job)
        reader.join()
    os.close(terminal)
    assert process.returncode == 0
    assert "\x1b[2J" in small, "what is left of wider lines goes"
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", small[small.index("\x1b[2J") :]).splitlines()
    assert max(map(len, lines)) <= 40
    assert "directory" not in small[small.index("\x1b[2J") :]
    assert "outcome" in b"".join(shown).decode()


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side has closed
        return b""


def test_a_filesystem_that_hangs_freezes_nothing(going_on: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_STALE_S", 0.3)
    looks = Looks([going_on])
    wait_for(lambda: looks.views()[0].progress)
    os.mkfifo(going_on.metrics_of("rollout-0"))  # who opens it for reading waits for ever
    lines = list[str]()

    def tells() -> bool:
        began = time.monotonic()
        lines[:] = [line.plain for line in one_run(looks.views()[0], 100, 30)]
        assert time.monotonic() - began < 1
        return any("the filesystem does not answer" in line for line in lines)

    wait_for(tells)
    assert any("step 7/10" in line for line in lines), "the last that is known"
    os.close(os.open(going_on.metrics_of("rollout-0"), os.O_WRONLY))  # lets the thread go on
    going_on.metrics_of("rollout-0").unlink()
    wait_for(lambda: not tells())


def test_a_scheduler_that_hangs_freezes_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(run)
    open_attempt(run, "7.0", ["n1"])
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 5\n")
    StatusWriter(run, "trainer", 1).write("step 7/10", step=7, total=10)
    looks = Looks([run])
    wait_for(lambda: looks.views()[0].progress, 3)
    text = "\n".join(line.plain for line in one_run(looks.views()[0], 100, 30))
    assert "project/mine: not known yet" in text
    assert "step 7/10" in text
    report_outcome(run, 1, "done", "finished", "agent-0")  # its threads end


def test_a_damaged_file_is_told(going_on: Run) -> None:
    going_on.attempts.write_text("nonsense\n")
    looks = Looks([going_on])
    with pytest.raises(Exception, match=r"attempts\.jsonl"):
        wait_for(lambda: looks.views() and looks.over())
