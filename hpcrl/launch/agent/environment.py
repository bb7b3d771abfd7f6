"""Environment variables of an agent's processes: identity, devices, threads, open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.launch.agent.devices import visible_devices
from hpcrl.launch.nodes import Node
from hpcrl.launch.pools import pool_of
from hpcrl.rundir.process_names import SCORER
from hpcrl.runtime.heartbeat import DIRECTORY

# Enroot sets these of a task in images with PyTorch; libraries take a process with them for a rank of a job. Ranks get their own.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPEN_FILES = 65536  # no more, whatever the hard limit: some programs close every number below the soft one


def raise_open_files() -> None:
    """Let this process and those that it starts open as many files as they may, up to 65,536.

    Many machines have a soft limit of 1,024, and a worker has a connection for each request of its engine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Environments:
    """Makes the environments of one node's processes.

    Args:
        address: at which servers of this node listen.
        heartbeats: directory of the heartbeats of this node.
        shared: whether all nodes of the run share this machine, and each takes its part of the devices.
    """

    def __init__(
        self,
        config: Config,
        node: Node,
        attempt: int,
        address: str,
        interface: str | None,
        heartbeats: Path,
        shared: bool,
    ) -> None:
        self._node, self._interface, self._shared = node, interface, shared
        pool = pool_of(config, node.workers[0]) if node.workers else None
        self._cpus = config.slurm.cpus_per_task if pool is None else pool.element(config)[0]
        self._width = config.generator.inference_engine.gpus // config.engine_nodes
        self._ordered, distillation = _wants_order(config), config.trainer.distillation
        self._teacher_ordered = distillation.backend == "megatron" and _shares_tokens(distillation.megatron_layout)
        self._own = {"HPCRL_ATTEMPT": str(attempt), "HPCRL_ADDRESS": address, DIRECTORY: str(heartbeats)}

    def of(self, name: str) -> dict[str, str]:
        """Return the whole environment of the process `name`: controller, trainer-<node>, or that of a worker.

        What the site or the user has set comes before a default; what they have set to nothing does not.
        """
        given = {variable: value for variable, value in os.environ.items() if variable not in _OF_RANKS}
        environment, node = {**given, **self._own}, self._node
        defaults = {
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns of names that it cannot resolve, and goes on
            # glibc gives threads heaps of their own, eight per core, each of which keeps what was freed in it
            "MALLOC_ARENA_MAX": "2",
        }
        if self._interface:
            environment["GLOO_SOCKET_IFNAME"] = self._interface
            defaults["NCCL_SOCKET_IFNAME"] = self._interface  # a site's own may list several
        if self._cpus:
            environment["OMP_NUM_THREADS"] = str(self._threads(self._cpus))
        elif node.gpus:  # a whole node; torchrun would leave each rank one
            defaults["OMP_NUM_THREADS"] = str(self._threads(len(os.sched_getaffinity(0))))
        if node.gpus:
            # by default each rank starts up to 32 processes that compile
            defaults["TORCHINDUCTOR_COMPILE_THREADS"] = (
                environment.get("OMP_NUM_THREADS") or defaults["OMP_NUM_THREADS"]
            )
            mine = visible_devices(node, self._shared)
            if name in node.workers:
                width = self._width if node.replicas or node.engine_parts else node.scorer_ranks
                position = node.workers.index(name)
                mine = [] if node.elsewhere else mine[position * width : (position + 1) * width]
            else:
                mine = mine[: node.ranks or node.scorer_ranks]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        if (name.startswith("trainer-") and self._ordered) or (name.startswith(SCORER) and self._teacher_ordered):
            defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        chosen = environment.get("PYTORCH_CUDA_ALLOC_CONF")  # its former name
        if name.startswith("trainer-") and node.gpus and not chosen:
            # micro-batches differ in length, and blocks of fixed sizes would leave gaps that nothing fits in; pinned memory above 1 MiB is as
            # large as its tensor, not the next power of two
            defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True,pinned_max_round_threshold_mb:1"
        if name == "controller" or not node.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if not node.gpus and not (environment.get("OMP_WAIT_POLICY") or environment.get("GOMP_SPINCOUNT")):
            # threads without work would keep the cores busy that other processes need, and to wake them for each operation takes as long as
            # a small one: they spin for some microseconds
            environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
        return environment | {variable: value for variable, value in defaults.items() if not environment.get(variable)}

    def _threads(self, cores: int) -> int:
        node = self._node
        workers = (len(node.workers) - len(node.sandboxes) or len(node.scorers)) * node.scorer_ranks
        # those of a node with both take turns
        turns = node.replicas and not node.elsewhere
        processes = max(node.ranks, workers) if turns else node.ranks + workers
        return max(1, cores // max(1, processes))


def _wants_order(config: Config) -> bool:
    """Return whether a GPU must start kernels in the order in which they are given to it.

    Megatron-core counts on that where it sends what layers share while they compute: what is sent first then does not wait for the computation.
    """
    return config.trainer.strategy == "megatron" and _shares_tokens(config.trainer.policy.megatron_config)


def _shares_tokens(sizes: MegatronModelConfig) -> bool:
    return max(sizes.tensor_model_parallel_size, sizes.context_parallel_size) > 1
