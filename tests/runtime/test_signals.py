"""Stop requests as a process hears them, also one that is stuck where no Python runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import read_process_statuses

SCRIPT = """
import ctypes, sys, time
from pathlib import Path
from hpcrl.runtime import signals
from hpcrl.rundir.layout import Run
signals._LOOK_S, signals._OTHERS_LOOK_S, signals._ALONE_S, signals._UNASKED_S = 0.05, 0.05, 0.3, 0.6
stop = signals.StopSignal()
run, stuck, has_progress, speaks = Run(Path(sys.argv[1])), *(word == "yes" for word in sys.argv[2:])
stop.follow(run, 3, "trainer", speaks=speaks)
stop.has_progress = has_progress
print("ready", flush=True)
if stuck:  # as in a collective: no handler of Python's runs here
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
while not stop.seen:
    time.sleep(0.01)
print("heard", flush=True)
time.sleep(1.5)
sys.exit(7)
"""


@contextmanager
def process(run: Run, *, stuck: bool, has_progress: bool, speaks: bool = True) -> Iterator[subprocess.Popen[str]]:
    words = ["yes" if flag else "no" for flag in (stuck, has_progress, speaks)]
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(run.path), *words]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
    finally:
        started.kill()
        started.wait()


def ask(run: Run, attempt: int = 3) -> None:
    write_json(run.stop, {"attempt": attempt, "reason": "interrupted"})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("stuck", [False, True])
def test_with_nothing_at_stake_it_leaves_by_itself(run: Run, stuck: bool) -> None:
    with process(run, stuck=stuck, has_progress=False) as started:
        ask(run)
        started.send_signal(signal.SIGTERM)
        assert started.wait(30) == 0
    assert [process_status.state for process_status in read_process_statuses(run, 3)] == ["stopped"]


def test_one_that_does_not_speak_says_nothing(run: Run) -> None:
    with process(run, stuck=True, has_progress=False, speaks=False) as started:
        ask(run)
        started.send_signal(signal.SIGUSR2)
        assert started.wait(30) == 0
    assert read_process_statuses(run) == []


def test_what_it_has_to_save_is_waited_for(run: Run) -> None:
    with process(run, stuck=False, has_progress=True) as started:
        ask(run)
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
            started.send_signal(number)
        assert started.wait(30) == 7


def test_the_stop_file_alone_is_heard(run: Run) -> None:
    with process(run, stuck=False, has_progress=True) as started:
        ask(run, attempt=2)
        time.sleep(0.3)
        ask(run)
        assert started.stdout is not None
        assert started.stdout.readline() == "heard\n"


@pytest.mark.parametrize("has_progress", [False, True])
def test_a_signal_that_nobody_asked_for(run: Run, has_progress: bool) -> None:
    """torchrun sends it when another rank has failed, for which this one waits."""
    with process(run, stuck=True, has_progress=has_progress) as started:
        ask(run, attempt=2)
        os.kill(started.pid, signal.SIGTERM)
        assert started.wait(30) == 1
    assert read_process_statuses(run) == []


AT_THE_VERY_END = """
import os, signal, sys
from hpcrl.runtime.signals import StopSignal

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR2):
        kill(pid, number)

stop, last = StopSignal(), Last()
if sys.argv[1] == "ignore":
    stop.ignore()
"""


@pytest.mark.parametrize(("how", "status"), [("ignore", 0), ("listen", -signal.SIGUSR2)])
def test_a_signal_while_python_ends(how: str, status: int) -> None:
    """Its handlers are gone by then: who is done has to ignore what may still come."""
    done = subprocess.run([sys.executable, "-c", AT_THE_VERY_END, how], check=False, timeout=60)
    assert done.returncode == status
