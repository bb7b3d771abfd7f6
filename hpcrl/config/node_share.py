"""What a run, and an element of its elastic pool, ask of their nodes where the configuration does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.config.derive import gpu_count, replicas_per_node
from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.sections.tree import ConfigTree


def takes_whole_nodes(slurm: SlurmConfig) -> bool:
    """Return whether a run shares no node with other jobs; where it is not set: if it asks for GPUs, and not for cores or memory."""
    if slurm.exclusive is not None:
        return slurm.exclusive
    return gpu_count(slurm) > 0 and slurm.cpus_per_task is None and slurm.mem_gb is None


def of_each_replica(config: ConfigTree) -> tuple[int | None, int | None, bool]:
    """Return what an element of the elastic pool asks for: cores, memory in GB, and whether it takes its whole node.

    Where they are not set they are the run's, divided among the replicas of a node. None: the cluster's default.
    """
    slurm, elastic, share = config.slurm, config.slurm.elastic, replicas_per_node(config)
    uncounted = gpu_count(slurm) > 0 and slurm.gpu_option == "none"  # two elements on a node would take the same GPUs
    if elastic.cpus_per_task is not None or elastic.mem_gb is not None:
        return elastic.cpus_per_task, elastic.mem_gb, uncounted
    if takes_whole_nodes(slurm) and (share == 1 or uncounted):
        return slurm.cpus_per_task, slurm.mem_gb or 0, True
    cpus = None if slurm.cpus_per_task is None else max(1, slurm.cpus_per_task // share)
    memory = slurm.mem_gb // share if slurm.mem_gb else slurm.mem_gb if share == 1 else None
    return cpus, memory, False


def has_scarce_cores(slurm: SlurmConfig) -> bool:
    """Return whether a run on GPUs asks for no cores and takes no whole nodes: most clusters give it one core per node."""
    asks = slurm.cpus_per_task is not None or takes_whole_nodes(slurm) or _asks_for_cores(slurm.extra)
    return gpu_count(slurm) > 0 and not asks


def pool_has_scarce_cores(config: ConfigTree) -> bool:
    """Return whether the elements of an elastic pool on GPUs ask for no cores and take no whole nodes."""
    slurm, (cpus, _, whole) = config.slurm, of_each_replica(config)
    asks = cpus is not None or whole or _asks_for_cores(slurm.elastic.extra)
    return slurm.elastic.replicas > 0 and gpu_count(slurm) > 0 and not asks


def _asks_for_cores(extra: Mapping[str, Any]) -> bool:
    return bool({name.replace("-", "_") for name in extra} & {"cpus_per_gpu", "exclusive"})
