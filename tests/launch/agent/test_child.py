"""Supervision of real processes: their end, their first error, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl import errors
from hpcrl.errors import CommitError
from hpcrl.launch.agent.child import Child
from hpcrl.rundir.space import explained


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


OURS = [name for name, kind in vars(errors).items() if isinstance(kind, type)]


@pytest.mark.parametrize("name", OURS)
def test_our_own_error_is_named_before_what_follows_from_it(tmp_path: Path, name: str) -> None:
    child = start(tmp_path, f"import sys; sys.exit('{name}: the cause\\nhttpx.ReadError: a consequence')")
    wait(child)
    assert f"worker: {name}: the cause (log: " in child.first_error()


def test_error_of_an_earlier_attempt_in_the_same_log_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("OldError: long ago\n")
    child = start(tmp_path, "import sys; sys.exit(3)")
    wait(child)
    assert child.first_error().startswith("worker: exit status 3")


def test_a_killed_process_says_by_which_signal(tmp_path: Path) -> None:
    child = start(tmp_path, "import os; os.kill(os.getpid(), 9)")
    wait(child)
    assert "killed by SIGKILL" in child.first_error()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("def main(:\n", "trainer-0: rank 0: SyntaxError: invalid syntax (log: "),
        pytest.param(
            "import nothing_of_the_kind\n",
            "trainer-0: rank 0: ModuleNotFoundError: No module named 'nothing_of_the_kind' (log: ",
            marks=pytest.mark.faults_slow,
        ),
        ("raise SystemExit(7)\n", "trainer-0: rank 0: exit status 1 (log: "),
    ],
)
def test_first_error_of_a_script_that_ended_before_torchrun_could_see_why(
    tmp_path: Path, script: str, expected: str
) -> None:
    """Its report then is an address where one may read how to get a better one."""
    (tmp_path / "rank.py").write_text(script)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        str(tmp_path / "rank.py"),
    ]
    child = Child("trainer-0", command, os.environ, tmp_path / "trainer.log")
    wait(child, 60)
    assert expected in child.first_error()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a filesystem")
@pytest.mark.parametrize(
    ("options", "fill", "expected"),
    [
        ("size=64k", "open(f'{place}/x', 'wb').write(bytes(1 << 20))", r"is full \(0 B free\): make room"),
        ("nr_inodes=9", "[open(f'{place}/{n}', 'x').close() for n in range(9)]", "takes no more files, see `df -i`"),
    ],
)
def test_a_full_filesystem_is_told_where_the_log_could_not(
    tmp_path: Path, options: str, fill: str, expected: str
) -> None:
    place = tmp_path / "full"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, check=False
    ).returncode:
        pytest.skip("may mount nothing")
    try:
        code = f"place = {str(place)!r}\ntry:\n  {fill}\nexcept OSError: raise SystemExit(1)"
        child = Child("trainer-0", [sys.executable, "-c", code], os.environ, place / "trainer.log")
        assert wait(child) == 1
        assert re.search(expected, child.first_error())
        if "nr_inodes" in options:
            with (
                pytest.raises(CommitError, match=r"No space left .*free; no more files fit, see `df -i`"),
                explained(place),
            ):
                (place / "another").touch()
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('row 3 is empty')", "ValueError: row 3 is empty"),
        pytest.param("os.kill(os.getpid(), 9)", "Signal 9 (SIGKILL) received by PID", marks=pytest.mark.faults_slow),
    ],
)
def test_first_error_behind_torchrun(tmp_path: Path, code: str, expected: str) -> None:
    """Rank 1 of two breaks: the report names it, not torchrun's own exception."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time\nfrom torch.distributed.elastic.multiprocessing.errors import record\n"
        f"@record\ndef main():\n    if os.environ['RANK'] == '1': {code}\n    time.sleep(60)\nmain()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    child = Child("trainer-0", command, os.environ, tmp_path / "trainer.log")
    wait(child, 60)
    assert f"trainer-0: rank 1: {expected}" in child.first_error()


@pytest.mark.parametrize("stubborn", [False, True])
def test_end_leaves_no_process_of_the_group(tmp_path: Path, stubborn: bool) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        f"if {stubborn}: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)\n"
        "time.sleep(60)"
    )
    child = start(tmp_path, code)
    while not (said := child.log_tail().strip()):
        time.sleep(0.02)
    child.end(patience_s=0.5)
    assert child.poll() is not None
    assert gone(int(said))


def test_child_dies_with_a_killed_agent(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    agent = (
        "import os, sys, time\nfrom pathlib import Path\nfrom hpcrl.launch.agent.child import Child\n"
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
