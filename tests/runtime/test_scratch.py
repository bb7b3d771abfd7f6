"""Directories of processes that live, were killed, or belong to another node or user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.config import InferenceEngineConfig
from hpcrl.engines.vllm.processes import group_of, shared_memory
from hpcrl.errors import ConfigError, RunError
from hpcrl.runtime.scratch import (
    SHARED_MEMORY,
    Scratch,
    SharedScratch,
    left_shared_memory,
    note_shared_memory,
    remove_abandoned,
    remove_shared_memory,
    weight_copy_dir,
)
from tests.envs.sandbox.material import without_namespaces

OWNER = (
    "import time; from hpcrl.runtime.scratch import Scratch; print(Scratch('agent').path, flush=True); time.sleep(600)"
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="scratch"))  # pytest's own are too long for a socket
    monkeypatch.setattr("tempfile.tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    shutil.rmtree(path)


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_only_what_killed_processes_left_is_removed(folder: Path) -> None:
    (living, kept), (dead, left) = owner(), owner()
    try:
        (left / "heartbeats").mkdir()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert kept.name.startswith("hpcrl-agent-")
        assert remove_abandoned() == [left]
        assert list(folder.iterdir()) == [kept]
    finally:
        living.kill()
        living.wait()
    mine = Scratch("engine")
    assert list(folder.iterdir()) == [mine.path], "the next one removed it"
    assert mine.path.stat().st_mode & 0o077 == 0
    mine.remove()
    assert not list(folder.iterdir())


SHARING = """
import secrets, sys, time
from multiprocessing import resource_tracker, shared_memory
from hpcrl.runtime.scratch import Scratch, note_shared_memory

resource_tracker.register = lambda *_: None  # it would remove them, and dies with the group of an engine
made = [shared_memory.SharedMemory(name=f"hpcrl-test-{secrets.token_hex(8)}", create=True, size=1) for _ in range(2)]
note_shared_memory(Scratch("engine").path, [made[0].name, "hpcrl-test-gone"])
print(*(one.name for one in made), flush=True)
time.sleep(600)
"""


def test_shared_memory_that_was_noted_goes_with_the_directory(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    noted, other = (SHARED_MEMORY / name for name in process.stdout.readline().split())
    try:
        assert remove_abandoned() == []
        assert noted.exists()
        process.kill()
        process.wait()
        assert len(remove_abandoned()) == 1
        assert not list(folder.iterdir())
        assert not noted.exists()
        assert other.exists(), "which nobody noted"
    finally:
        noted.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


USER = r"""
from hpcrl.envs.tools.python import run_python
from hpcrl.runtime.scratch import Scratch

scratch = Scratch("engine")
scratch.take_temporary_files()
print(scratch.path, flush=True)
run_python("import os, time\nfor _ in range(1100):\n    os.mkdir('d'); os.chdir('d')\nopen(os.environ['HOME'] + '/deep', 'w'); time.sleep(600)", 600)
"""


def test_programs_of_the_policy_leave_nothing_behind_a_killed_worker(folder: Path) -> None:
    # with namespaces their files are in memory, where nobody else sees them
    worker = subprocess.Popen([*without_namespaces(), sys.executable, "-c", USER], stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    left = Path(worker.stdout.readline().strip())
    deadline = time.monotonic() + 60
    while not list(left.glob("hpcrl-python-*/deep")):
        assert time.monotonic() < deadline, "the program does not run in the worker's directory"
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    assert remove_abandoned() == [left]
    assert not list(folder.iterdir())


def test_directories_that_nobody_may_enter_are_removed(folder: Path) -> None:
    process, left = owner()
    process.kill()
    process.wait()
    (left / "closed" / "inside").mkdir(parents=True)
    (left / "closed").chmod(0)
    remove = [sys.executable, "-c", "from hpcrl.runtime.scratch import remove_abandoned; remove_abandoned()"]
    if os.geteuid() == 0:  # whom modes do not stop
        remove = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *remove]
    subprocess.run(remove, check=True)
    assert not list(folder.iterdir())


def test_what_another_node_or_user_made_is_left(folder: Path) -> None:
    foreign = folder / "hpcrl-agent-there"
    foreign.mkdir()
    (foreign / "lock").write_text("another-node")
    unmarked = folder / "hpcrl-replay-output"
    unmarked.mkdir()
    hostname = os.uname().nodename
    linked = folder / "hpcrl-agent-linked"
    linked.mkdir()
    (folder / "elsewhere").write_text(hostname)
    (linked / "lock").symlink_to(folder / "elsewhere")
    stranger = folder / "hpcrl-agent-stranger"
    stranger.mkdir()
    (stranger / "lock").write_text(hostname)
    if os.geteuid() == 0:
        os.chown(stranger, 12345, 12345)
    else:
        shutil.rmtree(stranger)
    before = sorted(folder.iterdir())
    assert remove_abandoned() == []
    assert sorted(folder.iterdir()) == before


def test_a_variable_that_is_empty_makes_no_path_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InferenceEngineConfig(weight_copy_dir="$SCRATCH/${USER}_copies")
    monkeypatch.setenv("SCRATCH", "/local")
    monkeypatch.setenv("USER", "me")
    assert weight_copy_dir(engine) == Path("/local/me_copies")
    monkeypatch.setenv("SCRATCH", "")
    with pytest.raises(ConfigError, match="whose variables the node has"):
        weight_copy_dir(engine)


MAPS = "import mmap, sys, time; file = open(sys.argv[1], 'r+b'); kept = mmap.mmap(file.fileno(), 0); print('mapped', flush=True); time.sleep(600)"


def test_programs_need_no_name_that_is_text(folder: Path) -> None:
    """Linux cuts names after 15 bytes, also within a character, and paths are bytes."""
    program = folder / os.fsdecode("программа".encode() + b"\xff")
    shutil.copy("/bin/sleep", program)
    process = subprocess.Popen([program, "60"], start_new_session=True)
    try:
        with pytest.raises(UnicodeDecodeError):
            Path(f"/proc/{process.pid}/stat").read_text()
        assert group_of(process.pid) == [process.pid]
        assert shared_memory(process.pid) == set()
        left_shared_memory()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["nccl", "torch"])
def test_shared_memory_that_killed_processes_left_is_told_and_an_engines_is_removed(folder: Path, kind: str) -> None:
    path = SHARED_MEMORY / f"{kind}{'-' if kind == 'nccl' else '_'}test{os.getpid()}"
    path.write_bytes(b"x" * 4096)
    process = subprocess.Popen(
        [sys.executable, "-c", MAPS, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "mapped\n"
        old = time.time() - 3600
        os.utime(path, (old, old))
        assert path.name not in left_shared_memory(), "a process has it"
        noted = shared_memory(process.pid)
        assert (path.name in noted) == (kind == "nccl"), "an engine passes nothing through torch's own"
        process.kill()
        process.wait()
        assert left_shared_memory()[path.name] == 4096
        os.utime(path)
        assert path.name not in left_shared_memory(), "one that begins may be about to map it"
        note_shared_memory(folder, noted)
        remove_shared_memory(folder)
        assert path.exists() == (kind != "nccl")
    finally:
        process.kill()
        path.unlink(missing_ok=True)


def test_a_shared_directory_is_not_made_where_others_could_replace_it(folder: Path) -> None:
    """Who makes generator.inference_engine.weight_copy_dir first could give engines other weights."""
    folder.chmod(0o1777)
    shared = SharedScratch(folder, "weights-a")
    assert shared.path.stat().st_mode & 0o777 == 0o700
    shared.remove()
    folder.chmod(0o777)
    with pytest.raises(RunError, match=r"weights-a-.* other users could replace it there; choose another directory"):
        SharedScratch(folder, "weights-a")
    folder.chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        with pytest.raises(RunError, match="other users could replace it there"):
            SharedScratch(folder, "weights-a")


def test_systemd_removes_nothing_of_a_long_run(folder: Path) -> None:
    """It cleans /tmp of what is older than 10 days, as it is installed: of files of images and weights that are in use, too."""
    program = shutil.which("systemd-tmpfiles") or pytest.skip("systemd-tmpfiles is not installed here")
    folder.chmod(0o1777)
    own, shared = Scratch("sandboxes"), SharedScratch(folder, "weights-a")
    for directory in (folder, own.path, shared.path):
        (directory / "old").write_text("")
    time.sleep(1.5)
    subprocess.run([program, "--clean", "-"], input=f"d {folder} - - - 1s\n", text=True, check=True)
    assert not (folder / "old").exists()
    assert all((directory / "old").exists() for directory in (own.path, shared.path))
    own.remove()
    shared.remove()
    assert not list(folder.iterdir())
