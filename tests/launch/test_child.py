"""Supervision of real processes: their end, their first error, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.launch.child import Child


def wait(child: Child, seconds: float = 10) -> int:
    deadline = time.monotonic() + seconds
    while (status := child.poll()) is None:
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.02)
    return status


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def start(tmp_path: Path, code: str, **options: object) -> Child:
    return Child("worker", [sys.executable, "-u", "-c", code], os.environ, tmp_path / "worker.log", **options)  # type: ignore[arg-type]


def test_first_error_is_the_exception_not_the_noise(tmp_path: Path) -> None:
    child = start(tmp_path, "print('ready')\nraise ValueError('no such thing: x')")
    assert wait(child) == 1
    assert "worker: ValueError: no such thing: x (log: " in child.first_error()


def test_error_of_an_earlier_attempt_in_the_same_log_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("OldError: long ago\n")
    child = start(tmp_path, "import sys; sys.exit(3)")
    wait(child)
    assert child.first_error().startswith("worker: exit status 3")


def test_a_killed_process_says_by_which_signal(tmp_path: Path) -> None:
    child = start(tmp_path, "import os; os.kill(os.getpid(), 9)")
    wait(child)
    assert "killed by SIGKILL" in child.first_error()


def test_torchrun_error_file_wins(tmp_path: Path) -> None:
    error = tmp_path / "error.json"
    error.write_text('{"message": {"message": "Traceback\\nRuntimeError: rank 3 broke", "extraInfo": {}}}')
    child = start(tmp_path, "raise SystemExit(1)", error_file=error)
    wait(child)
    assert "RuntimeError: rank 3 broke" in child.first_error()


@pytest.mark.parametrize("stubborn", [False, True])
def test_end_leaves_no_process_of_the_group(tmp_path: Path, stubborn: bool) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        f"if {stubborn}: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)\n"
        "time.sleep(60)"
    )
    child = start(tmp_path, code)
    while not (said := child.said().strip()):
        time.sleep(0.02)
    child.end(patience_s=0.5)
    assert child.poll() is not None
    assert gone(int(said))


def test_child_dies_with_a_killed_agent(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    agent = (
        "import os, sys, time\nfrom pathlib import Path\nfrom hpcrl.launch.child import Child\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        f"Child('worker', [sys.executable, '-c', code], os.environ, Path({str(log)!r}))\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", agent])
    while not (log.exists() and log.read_text().strip()):
        time.sleep(0.05)
    pid = int(log.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(pid)
