"""How many threads the processes of a node get, of the cores that Slurm was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.launch.environment import Environments
from hpcrl.launch.plan import Node

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
SETTINGS = ("slurm.cpus_per_task=32", "slurm.elastic.replicas=2", "generator.inference_engine.num_engines=4")


@pytest.mark.parametrize(
    ("node", "pool", "threads"),
    [
        (Node(0, "trainer", 8, (), 0, 0), 12, "4"),
        (Node(1, "rollout", 0, (2, 3), 0, 0), 12, "16"),
        (Node(7, "rollout", 0, (5,), 0, 0), 12, "12"),
        (Node(7, "rollout", 0, (5,), 0, 0), None, None),
    ],
)
def test_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Node, pool: int | None, threads: str | None
) -> None:
    """A replica of the pool has the cores of its own job, not those of the run's nodes."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    of_pool = [f"slurm.elastic.cpus_per_task={pool}"] if pool else []
    config = Config.from_toml([QUICKSTART], [*SETTINGS, *of_pool])
    environments = Environments(config, node, 1, "127.0.0.1", None, tmp_path, False)
    assert environments.of("any" if node.ranks else f"rollout-{node.replicas[0]}").get("OMP_NUM_THREADS") == threads
