"""The command of `make test` runs with pytest's directories in memory, or, where these cannot be, as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

WRITES = 'echo x > "$TMPDIR/pytest-of-somebody/file" && exit 7'


def in_memory(place: Path, command: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    """Run a command of the shell by tests/in_memory, for a user whose pytest directories are below a place."""
    environment = {**os.environ, "TMPDIR": str(place), "LOGNAME": "somebody", "PATH": path}
    words = [str(ROOT / "tests" / "in_memory"), "sh", "-c", command]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


def made(folder: Path, name: str, script: str) -> str:
    """Return a PATH in which a program is replaced by a script."""
    folder.mkdir()
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which a tmpfs can be mounted."""
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if os.getuid() or not shutil.which("unshare") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    return tmp_path


def test_files_are_in_memory_and_status_and_signals_pass(place: Path, tmp_path: Path) -> None:
    much = made(tmp_path / "bin", "sort", "echo 99000000000")
    done = in_memory(place, WRITES, much)
    assert done.returncode == 7, done.stderr
    assert list((place / "pytest-of-somebody").iterdir()) == []
    assert in_memory(place, "kill -TERM $$", much).returncode == -15


@pytest.mark.parametrize(
    ("program", "script"),
    [("mount", "exit 32"), ("unshare", "exit 1"), ("id", "echo 1000"), ("sort", "echo 4000000000")],
)
def test_a_machine_that_cannot_runs_the_command_on_the_disk(program: str, script: str, tmp_path: Path) -> None:
    (tmp_path / "pytest-of-somebody").mkdir()
    done = in_memory(tmp_path, WRITES, made(tmp_path / "bin", program, script))
    assert (done.returncode, done.stderr) == (7, "")
    assert (tmp_path / "pytest-of-somebody" / "file").read_text() == "x\n"
