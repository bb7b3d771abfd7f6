"""Sampling a process of a run: which one is meant, and what py-spy says of one that works, waits, or may not be read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.errors import RunError
from hpcrl.launch.attach import profile_remote
from hpcrl.launch.attach.profile import busiest, process_of
from hpcrl.launch.nodes import Node
from hpcrl.rundir.layout import Run

PLAN = [
    Node(0, "trainer", 2, (), 0, 0),
    Node(1, "trainer", 2, (), 0, 0, first_rank=2),
    Node(2, "rollout", 0, (0, 1), 0, 0),
]
PLAN += [Node(3, "reward", 0, (), 0, 0, (0,)), Node(4, "scorer", 0, (), 0, 0, (), (0, 1))]
PROCESS = """
import sys, time
from pathlib import Path
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat

def busy():
    while True:
        sum(range(1000))

Heartbeat(Run(Path(sys.argv[1])), 1, sys.argv[2])
print(flush=True)
busy() if sys.argv[2] == "rank-1" else time.sleep(100)
"""


def test_process_by_role_and_number() -> None:
    found = [process_of(PLAN, role, number) for role, number in (("trainer", 3), ("rollout", 1), ("scorer", 1))]
    assert [(name, node.index) for name, node in found] == [("rank-3", 1), ("rollout-1", 2), ("scorer-1", 4)]
    assert process_of(PLAN, "controller", 0) == ("controller", PLAN[0])
    turns = [Node(0, "trainer", 1, (0,), 0, 0), Node(1, "trainer", 1, (1,), 0, 0, first_rank=1)]
    assert process_of(turns, "rollout", 1) == ("rollout-1", turns[1])
    with pytest.raises(RunError, match=r"no rank-4; of the role trainer it has rank-0, rank-1, rank-2, rank-3$"):
        process_of(PLAN, "trainer", 4)
    with pytest.raises(RunError, match="no scorer-0; of the role scorer it has nothing"):
        process_of(PLAN[:2], "scorer", 0)


def test_functions_by_their_own_samples() -> None:
    raw = "main;step;forward 6\nmain;step;backward 3\nmain;step 1\nmain;step;forward;forward 10\n"
    assert busiest(raw, 2) == [("forward", 0.8, 0.8), ("backward", 0.15, 0.15)]
    assert busiest(raw, 9)[2] == ("step", 0.05, 1.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run with two processes on this machine: rank-1 computes, rollout-0 waits."""
    run, beats, started = Run(tmp_path / "run"), tmp_path / "beats", []
    run.path.mkdir()
    beats.mkdir()
    (tmp_path / "train.py").write_text(PROCESS)
    for name in ("rank-1", "rollout-0"):
        command = [sys.executable, str(tmp_path / "train.py"), str(run.path), name]
        environment = {**os.environ, "HPCRL_ATTEMPT": "1", "HPCRL_HEARTBEAT": str(beats)}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    for process in started:
        assert process.stdout
        process.stdout.readline()
    yield run
    assert all(process.poll() is None for process in started), "sampling ended a process"
    for process in started:
        process.kill()
        process.communicate()


def ask(run: Run, process: str, form: str = "raw", idle: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcrl.launch.attach.profile_remote", str(run.path), "1", process, "1"]
    return subprocess.run([*command, form, str(int(idle))], capture_output=True, text=True)


def test_what_works_and_what_waits(run: Run) -> None:
    assert "busy (" in busiest(ask(run, "rank-1").stdout, 1)[0][0]
    assert "the process waited for all of 1 s; --idle" in ask(run, "rollout-0").stderr
    with pytest.raises(RunError, match="rollout-7 of run does not run on"):
        profile_remote.find(run, 1, "rollout-7")
    assert ask(run, "rollout-0", "flamegraph", idle=True).stdout.startswith("<?xml")


def test_a_node_without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"py-spy is not installed on .*: pip install 'hpcrl\[profile\]' in "):
        profile_remote.record(1, 1, "raw", idle=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read a process")
def test_a_process_that_may_not_be_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = profile_remote.find(run, 1, "rank-1")
    program = shutil.copy(Path(sys.executable).parent / "py-spy", "/tmp/hpcrl-test-py-spy")
    try:
        said = subprocess.run(
            [program, "record", "--nonblocking", "-d", "1", "-f", "raw", "-o", "/dev/null", "--pid", str(pid)],
            user="nobody", capture_output=True, text=True,
        ).stderr  # fmt: skip
    finally:
        Path(program).unlink()
    monkeypatch.setattr(profile_remote, "_YAMA", tmp_path / "ptrace_scope")
    assert f"py-spy may not read process {pid} on n1. Ask" in profile_remote._reason(said, pid, "n1")
    (tmp_path / "ptrace_scope").write_text("1\n")
    message = profile_remote._reason(said, pid, "n1")
    assert "kernel.yama.ptrace_scope is 1 there" in message
    assert "setcap cap_sys_ptrace=ep" in message
