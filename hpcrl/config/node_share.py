"""What a run, and an element of one of its elastic pools, ask of their nodes where the configuration does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.config.derive import gpu_count
from hpcrl.config.sections.slurm import ElasticConfig, SlurmConfig


def takes_whole_nodes(slurm: SlurmConfig) -> bool:
    """Return whether a run shares no node with other jobs; where it is not set: if it asks for GPUs, and not for cores or memory."""
    if slurm.exclusive is not None:
        return slurm.exclusive
    return gpu_count(slurm) > 0 and slurm.cpus_per_task is None and slurm.mem_gb is None


def of_element(slurm: SlurmConfig, asked: ElasticConfig, share: int) -> tuple[int | None, int | None, bool]:
    """Return what an element of an elastic pool asks for: cores, memory in GB, and whether it takes its whole node.

    Where they are not set they are the run's, divided among those of the same kind on a node. None: the cluster's default.

    Args:
        share: how many of these a node of the run has.
    """
    uncounted = gpu_count(slurm) > 0 and slurm.gpu_option == "none"  # two elements on a node would take the same GPUs
    if asked.cpus_per_task is not None or asked.mem_gb is not None:
        return asked.cpus_per_task, asked.mem_gb, uncounted
    if takes_whole_nodes(slurm) and (share == 1 or uncounted):
        return slurm.cpus_per_task, slurm.mem_gb or 0, True
    cpus = None if slurm.cpus_per_task is None else max(1, slurm.cpus_per_task // share)
    memory = slurm.mem_gb // share if slurm.mem_gb else slurm.mem_gb if share == 1 else None
    return cpus, memory, False


def has_scarce_cores(slurm: SlurmConfig) -> bool:
    """Return whether a run on GPUs asks for no cores and takes no whole nodes: most clusters give it one core per node."""
    asks = slurm.cpus_per_task is not None or takes_whole_nodes(slurm) or _asks_for_cores(slurm.extra)
    return gpu_count(slurm) > 0 and not asks


def asks_for_few_cores(slurm: SlurmConfig, asked: ElasticConfig, element: tuple[int | None, int | None, bool]) -> bool:
    """Return whether the elements of an elastic pool on GPUs ask for no cores and take no whole nodes.

    Args:
        element: as of `of_element`.
    """
    cpus, _, whole = element
    asks = cpus is not None or whole or _asks_for_cores(asked.extra)
    return gpu_count(slurm) > 0 and not asks


def _asks_for_cores(extra: Mapping[str, Any]) -> bool:
    return bool({name.replace("-", "_") for name in extra} & {"cpus_per_gpu", "exclusive"})
