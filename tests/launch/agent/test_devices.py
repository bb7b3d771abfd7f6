"""Which GPUs the processes of a node get, and what is said where they cannot have them. The machine of these tests has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import DeviceError
from hpcrl.launch.agent.devices import require_gpus
from hpcrl.launch.agent.environment import Environments
from hpcrl.launch.nodes import Node
from hpcrl.rundir.commit import write_text
from tests.paths import QUICKSTART

TRAINER, ROLLOUT = Node(0, "trainer", 4, (), 4, 0), Node(1, "rollout", 0, (2, 3), 4, 4)
IDS = "GPU-8932f937,GPU-03a1,MIG-5c,MIG-6d"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("node", "given", "shared", "name", "expected"),
    [
        (TRAINER, None, False, "trainer-0", "0,1,2,3"),
        (TRAINER, "4,5,6,7", False, "trainer-0", "4,5,6,7"),
        (TRAINER, IDS, False, "trainer-0", IDS),
        (TRAINER, "0, 1, 2, 3, 4", False, "trainer-0", "0,1,2,3"),
        (TRAINER, None, False, "controller", ""),
        (ROLLOUT, None, False, "rollout-2", "0,1"),
        (ROLLOUT, None, False, "rollout-3", "2,3"),
        (ROLLOUT, IDS, False, "rollout-3", "MIG-5c,MIG-6d"),
        (ROLLOUT, None, True, "rollout-3", "6,7"),
        (ROLLOUT, "8,9,10,11,12,13,14,15", True, "rollout-2", "12,13"),
        (Node(1, "rollout", 0, (2,), 0, 0), "0,1", False, "rollout-2", ""),
    ],
)
def test_every_process_has_its_own(
    devices: pytest.MonkeyPatch, tmp_path: Path, node: Node, given: str | None, shared: bool, name: str, expected: str
) -> None:
    """Also where nothing sets the variable, as on sites that lend whole nodes, where each replica used to take device 0."""
    if given is not None:
        devices.setenv("CUDA_VISIBLE_DEVICES", given)
    config = Config.from_toml([QUICKSTART], ["generator.inference_engine.tensor_parallel_size=2"])
    environments = Environments(config, node, 1, "127.0.0.1", None, tmp_path, shared)
    assert environments.of(name)["CUDA_VISIBLE_DEVICES"] == expected


def nvidia_smi(devices: pytest.MonkeyPatch, folder: Path, lines: list[str]) -> None:
    """Put an nvidia-smi first that prints these lines."""
    program = folder / "nvidia-smi"
    write_text(program, "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines), mode=0o700)
    devices.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def refused(node: Node) -> str:
    with pytest.raises(DeviceError) as caught:
        require_gpus(node, shared=False)
    return str(caught.value)


def test_fewer_than_needed(devices: pytest.MonkeyPatch) -> None:
    devices.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert refused(TRAINER) == (
        "4 GPU(s) are needed on this node, and it was given 2 (CUDA_VISIBLE_DEVICES='0,1'): ask for them with "
        "slurm.gpus_per_node, or with slurm.extra where the site counts them by another name"
    )


def test_torch_that_sees_none_names_driver_and_build(devices: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia_smi(devices, tmp_path, ["NVIDIA H100 80GB HBM3, 535.104.05, 81559 MiB"] * 4)
    message = refused(TRAINER)
    assert message.startswith("4 GPU(s) are needed on this node, and torch 2.")
    assert "sees 0 (driver 535.104.05 with 4 x NVIDIA H100 80GB HBM3; CUDA_VISIBLE_DEVICES is not set): " in message
    assert message.endswith("; slurm.gpus_per_node=0 is a run on CPUs")


def test_torch_that_cannot_be_imported(devices: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    devices.setenv("PYTHONPATH", str(tmp_path))
    message = "torch cannot be imported on this node: OSError: libcudart.so.13: cannot open shared object file"
    assert refused(TRAINER) == message


def test_a_run_on_cpus_asks_nothing(devices: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError")
    devices.setenv("PYTHONPATH", str(tmp_path))
    require_gpus(Node(0, "trainer", 2, (), 0, 0), shared=False)
