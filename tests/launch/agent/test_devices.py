"""Which GPUs the processes of a node get."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.launch.agent.environment import Environments
from hpcrl.launch.nodes import Node
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
        (TRAINER, "", False, "trainer-0", ""),
        (TRAINER, "-1", False, "trainer-0", ""),
        (TRAINER, "NoDevFiles", False, "trainer-0", ""),
        (TRAINER, "2,-1,3", False, "trainer-0", "2"),
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
    config = Config.from_toml(
        [QUICKSTART], ["generator.inference_engine.backend=vllm", "generator.inference_engine.tensor_parallel_size=2"]
    )
    environments = Environments(config, node, 1, "127.0.0.1", None, tmp_path, shared)
    assert environments.of(name)["CUDA_VISIBLE_DEVICES"] == expected
