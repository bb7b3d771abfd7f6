"""How many threads the processes of a node get, of the cores that Slurm was asked for, how they wait, and how many files they may open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.launch.agent.environment import Environments
from hpcrl.launch.agent.processes import NodeProcesses
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.nodes import Node, make_plan
from hpcrl.rundir.layout import Run
from tests.paths import QUICKSTART

SETTINGS = (
    "slurm.cpus_per_task=32",
    "slurm.replicas_per_node=2",
    "slurm.elastic.replicas=2",
    "generator.inference_engine.num_engines=4",
)


@pytest.mark.parametrize(
    ("node", "pool", "threads"),
    [
        (Node(0, "trainer", 8, (), 0, 0), 12, "4"),
        (Node(1, "rollout", 0, (2, 3), 0, 0), 12, "16"),
        (Node(7, "rollout", 0, (5,), 0, 0), 12, "12"),
        (Node(7, "rollout", 0, (5,), 0, 0), None, "16"),
    ],
)
def test_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Node, pool: int | None, threads: str | None
) -> None:
    """A replica of the pool has the cores of its own job, which are its share of a node of the run's where nothing else is said."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    of_pool = [f"slurm.elastic.cpus_per_task={pool}"] if pool else []
    config = Config.from_toml([QUICKSTART], [*SETTINGS, *of_pool])
    environments = Environments(config, node, 1, "127.0.0.1", None, tmp_path, False)
    assert environments.of("any" if node.ranks else f"rollout-{node.replicas[0]}").get("OMP_NUM_THREADS") == threads


def test_threads_of_a_whole_node_with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the cores of the node: torchrun would leave each of them one. What the user sets stays."""
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # vLLM sets the latter where it is imported
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(96))
    config = Config.from_toml([QUICKSTART])
    trainer, rollout = Node(0, "trainer", 8, (), 8, 0), Node(1, "rollout", 0, (0, 1), 8, 0)
    for node, name, threads in ((trainer, "trainer-0", "12"), (rollout, "rollout-0", "48")):
        environment = Environments(config, node, 1, "127.0.0.1", None, tmp_path, False).of(name)
        assert (environment["OMP_NUM_THREADS"], environment["TORCHINDUCTOR_COMPILE_THREADS"]) == (threads, threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (
        Environments(config, trainer, 1, "127.0.0.1", None, tmp_path, False).of("trainer-0")["OMP_NUM_THREADS"] == "3"
    )
    on_cpus = Environments(config, Node(0, "trainer", 8, (), 0, 0), 1, "127.0.0.1", None, tmp_path, False)
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in on_cpus.of("trainer-0")


@pytest.mark.parametrize(("gpus", "users", "policy"), [(0, None, "PASSIVE"), (0, "ACTIVE", "ACTIVE"), (1, None, None)])
def test_threads_without_work_leave_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, users: str | None, policy: str | None
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    config = Config.from_toml([QUICKSTART])
    environments = Environments(config, Node(0, "trainer", 1, (0,), gpus, 0), 1, "127.0.0.1", None, tmp_path, False)
    for name in ("trainer-0", "rollout-0"):
        assert environments.of(name).get("OMP_WAIT_POLICY") == policy
        assert ("GOMP_SPINCOUNT" in environments.of(name)) == (policy == "PASSIVE"), "what the user says is not changed"


@pytest.mark.parametrize(("users", "found"), [(None, "2"), ("8", "8")])
def test_few_heaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str | None, found: str) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if users is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", users)
    environments = Environments(
        Config.from_toml([QUICKSTART]), Node(0, "trainer", 1, (0,), 0, 0), 1, "127.0.0.1", None, tmp_path, False
    )
    assert environments.of("rollout-0")["MALLOC_ARENA_MAX"] == found


def test_no_process_is_taken_for_a_rank_of_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with PyTorch gets these by Enroot's hook."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    for name in names:
        monkeypatch.setenv(name, "1")
    node = Node(0, "trainer", 1, (0,), 0, 0)
    environments = Environments(Config.from_toml([QUICKSTART]), node, 1, "127.0.0.1", None, tmp_path, False)
    for process in ("controller", "trainer-0", "rollout-0"):
        assert not names & set(environments.of(process))


def test_a_variable_that_is_empty_counts_as_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, node = Config.from_toml([QUICKSTART], ["slurm.gpus_per_node=1"]), Node(0, "trainer", 1, (0,), 1, 0)

    def environment() -> dict[str, str]:
        return Environments(config, node, 1, "127.0.0.1", "eth0", tmp_path, False).of("trainer-0")

    names = [
        "TORCH_CPP_LOG_LEVEL", "MALLOC_ARENA_MAX", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS",
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT",
    ]  # fmt: skip
    for name in names:
        monkeypatch.delenv(name, raising=False)
    unset = environment()
    for name in names:
        monkeypatch.setenv(name, "")
    assert {name: value for name, value in environment().items() if value} == {n: v for n, v in unset.items() if v}


SIZES = "trainer.policy.megatron_config"


@pytest.mark.parametrize(
    ("file", "sizes", "users", "trainer"),
    [
        ("quickstart", {}, None, None),
        ("quickstart_megatron", {"tensor": 1}, None, None),
        ("quickstart_megatron", {"tensor": 1, "pipeline": 2}, None, None),
        ("quickstart_megatron", {"tensor": 1, "context": 2}, None, "1"),
        ("quickstart_megatron", {"tensor": 2}, None, "1"),
        ("quickstart_megatron", {"tensor": 2}, "8", "8"),
    ],
)
def test_order_of_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    sizes: dict[str, int],
    users: str | None,
    trainer: str | None,
) -> None:
    """Only trainer ranks whose layers wait for each other have it, and what the user set stays."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv(name, users)
    own = {"context": "context_parallel_size"}
    given = [f"{SIZES}.{own.get(kind, f'{kind}_model_parallel_size')}={size}" for kind, size in sizes.items()]
    more = ["trainer.placement.policy_num_gpus_per_node=2", "trainer.algorithm.use_kl_loss=false"]
    config = Config.from_toml([QUICKSTART.with_stem(file)], [*more, *given])
    environments = Environments(config, Node(0, "trainer", 2, (0,), 0, 0), 1, "127.0.0.1", None, tmp_path, False)
    assert environments.of("trainer-0").get(name) == trainer
    assert environments.of("rollout-0").get(name) == users
    assert environments.of("controller").get(name) == users


@pytest.mark.parametrize(
    ("gpus", "users", "trainer"),
    [
        (0, {}, None),
        (1, {}, "expandable_segments:True,pinned_max_round_threshold_mb:1"),
        (1, {"PYTORCH_CUDA_ALLOC_CONF": "a"}, None),
    ],
)
def test_the_allocator_of_ranks_on_gpus_grows_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, users: dict[str, str], trainer: str | None
) -> None:
    """Unless the user has said how, also by its former name."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    config = Config.from_toml([QUICKSTART], [f"slurm.gpus_per_node={gpus}"])
    environments = Environments(config, Node(0, "trainer", 1, (0,), gpus, 0), 1, "127.0.0.1", None, tmp_path, False)
    assert environments.of("trainer-0").get("PYTORCH_ALLOC_CONF") == trainer
    assert environments.of("rollout-0").get("PYTORCH_ALLOC_CONF") is None


@pytest.mark.parametrize(("limit", "raised"), [("ulimit -Sn 256", True), ("ulimit -n 256", False)])
def test_as_many_open_files_as_there_may_be(limit: str, raised: bool) -> None:
    """Many machines have a soft limit of 1,024, which requests to an engine exceed."""
    code = "from hpcrl.launch.agent.environment import raise_open_files; import os; raise_open_files(); os.system('ulimit -n')"
    shell = f'{limit} && exec {sys.executable} -c "{code}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    assert int(done.stdout) == (most if raised else 256)


def test_a_node_raises_the_limit_for_its_processes(tmp_path: Path) -> None:
    config, context = Config.from_toml([QUICKSTART]), NodeContext(0, ["here"], "local-1", 0, True)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        NodeProcesses(Run(tmp_path / "run"), config, context, 1, make_plan(config)[0], 5.0).end(0.0)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert soft > 256
