"""NUMA nodes of GPUs, and the commands that bind processes to them: programs stand in for nvidia-smi and numactl, a directory for sysfs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.engines.vllm.server import _command
from hpcrl.launch.agent.processes import NodeProcesses
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.nodes import Node
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime import numa
from hpcrl.runtime.numa import nodes_of_gpus
from tests.paths import QUICKSTART
from tests.rollout.material import options

GPUS = 4
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return what builds a machine of four GPUs and two NUMA nodes with four cores each."""

    def build(
        near: tuple[int, ...] = (0, 0, 1, 1), cores: tuple[str, ...] = ("0-1,4-5", "2-3,6-7", ""), numactl: bool = True
    ) -> None:
        for node, own in enumerate(cores):
            write_text(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{own}\n")
        for gpu, node in enumerate(near):
            write_text(tmp_path / f"sys/bus/pci/devices/0000:{gpu + 10:02x}:00.0/numa_node", f"{node}\n")
        rows = "".join(f"{gpu}, GPU-{gpu}aa, 00000000:{gpu + 10:02X}:00.0\n" for gpu in range(GPUS))
        folder = tmp_path / "bin"
        write_text(folder / "nvidia-smi", f"#!/bin/sh\ncat <<END\n{rows}END\n", mode=0o700)
        if numactl:
            write_text(folder / "numactl", "#!/bin/sh\n", mode=0o700)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setattr(numa, "SYSFS", tmp_path / "sys")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))

    return build


def test_gpus_have_the_nodes_that_they_are_near(machine: Machine) -> None:
    machine()
    assert numa.numa_nodes() == [0, 1], "a node that is a GPU's memory has no cores"
    assert nodes_of_gpus("0,1,2,3") == [0, 0, 1, 1]
    assert nodes_of_gpus("GPU-2,1") == [1, 0]
    assert nodes_of_gpus("") is None
    assert nodes_of_gpus("0,MIG-1f3c") is None


def test_nothing_is_bound_where_it_would_fail_or_do_harm(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(near=(0, 0, 0, 0))
    assert nodes_of_gpus("0,1") is None, "all are near one node, or the machine says so"
    machine(near=(0, 0, -1, -1))
    assert nodes_of_gpus("0,1") is None, "the machine does not say"
    machine(near=(0, 0, 1))
    assert nodes_of_gpus("0,1") is None, "nothing is known of one"
    machine(cores=("0-7", "", ""))
    assert nodes_of_gpus("0,1") is None, "one node"
    machine()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    assert nodes_of_gpus("0,1") is None, "Slurm gave a core of the second node"


def test_nothing_is_bound_without_numactl(machine: Machine) -> None:
    machine(numactl=False)
    assert nodes_of_gpus("0,1,2,3") is None


@pytest.mark.parametrize("numactl", [True, False])
def test_commands_of_ranks_and_engines(
    machine: Machine, numactl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(numactl=numactl)
    config = Config.from_toml([QUICKSTART], ["trainer.placement.policy_num_gpus_per_node=2"])
    node, context = Node(0, "trainer", 2, (), 2, 0), NodeContext(0, ["here"], "local-1", 0, True)
    processes = NodeProcesses(Run(tmp_path / "run"), config, context, 1, node, 5.0)
    try:
        processes.publish_rendezvous()
        processes.follow_rendezvous()
    finally:
        processes.end(0.0)
    words = capsys.readouterr().out.split()
    assert ("--numa-binding=node" in words) == numactl
    assert words.index("--no-python") > max(
        (words.index(word) for word in words if word.startswith("--numa")), default=0
    )

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    given = replace(options("model", tmp_path), on_cpu=False)
    command = _command(given, Path("socket"))
    if not numactl:
        assert not [word for word in command if "numa" in word]
        return
    at = command.index("--numa-bind")
    assert command[at + 1 : at + 4] == ["--numa-bind-nodes", "0", "1"]
    off = replace(given, engine=replace(given.engine, engine_init_kwargs={"numa_bind": False}))
    assert [word for word in _command(off, Path("socket")) if "numa" in word] == ["--no-numa-bind"]
