"""Which node of a run is meant, and whose environment is taken over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.attach.attach import choose, on_node
from hpcrl.launch.attach.remote import processes
from hpcrl.launch.nodes import Node
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from tests.launch.manage.slurm_records import CONFIG, PAST, squeue, state, submitted

PLAN = [Node(0, "trainer", 1, (), 0, 0), Node(1, "trainer", 1, (), 0, 0), Node(2, "rollout", 0, (0, 1), 0, 0)]
PLAN += [Node(3, "reward", 0, (), 0, 0, (0,))]
HOSTS = ["a", "b", "c", "d"]


def test_node_by_role_name_and_number() -> None:
    assert choose(PLAN, HOSTS, None, None).index == 0
    assert choose(PLAN, HOSTS, None, "rollout").index == 2
    assert choose(PLAN, HOSTS, None, "reward").index == 3
    both = [Node(0, "trainer", 1, (0,), 0, 0)]
    assert choose(both, HOSTS, None, "rollout").role == "trainer", "engines that take turns with it are there"
    beside = [Node(0, "trainer", 1, (), 0, 0), Node(1, "rollout", 0, (0,), 0, 0, sandboxes=(0,))]
    assert choose(beside, HOSTS, None, "sandbox").index == 1
    assert choose(PLAN, HOSTS, "b", None).index == choose(PLAN, HOSTS, "1", "trainer").index == 1
    with pytest.raises(
        RunError, match=r"no rollout node b; it has 0 a \(trainer\), 1 b \(trainer\), 2 c \(rollout\), 3 d"
    ):
        choose(PLAN, HOSTS, "b", "rollout")


def test_without_srun_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    write_text(run.config, CONFIG)
    submitted(run)
    squeue(monkeypatch, tmp_path, f"7|RUNNING|{PAST}|None|")
    of_slurm = state(run)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SubmitError, match="srun was not found: ask for runs of Slurm on a node of its cluster"):
        on_node(of_slurm, "a")


def test_processes_of_an_attempt_and_a_command_beside_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    script = tmp_path / "train.py"
    script.write_text("print(flush=True)\ninput()\n")
    environment = {**os.environ, "HPCRL_ATTEMPT": "3", "MINE": os.fsdecode(b"kept\xff")}
    process = subprocess.Popen(
        [sys.executable, str(script), str(run.path)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout
        process.stdout.readline()
        assert list(processes(run, 3)) == [process.pid]
        assert processes(run, 2) == {}
        command = [sys.executable, "-m", "hpcrl.launch.attach.remote", str(run.path), "3", "0"]
        said = subprocess.run([*command, "trainer", "sh", "-c", "echo $MINE; pwd"], capture_output=True)
        assert said.stdout == b"kept\xff\n" + os.fsencode(f"{run.path}\n"), "values of variables need not be text"
        other = subprocess.run([*command, "rollout", "sh", "-c", "echo .$MINE"], capture_output=True, text=True)
        assert other.stdout == ".\n"
        assert "no rollout process of run runs on" in other.stderr
    finally:
        process.communicate(b"\n", timeout=20)
