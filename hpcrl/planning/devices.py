"""Finds the memory of a trainer rank's device."""

from __future__ import annotations

import re

from hpcrl.config import Config
from hpcrl.launch.doctor.node import gpus_here

GIB = 2**30

_MIB = re.compile(r"(\d+) MiB")


def memory_of_rank(config: Config, ranks: int | None = None) -> tuple[float | None, str]:
    """Return the bytes of a rank's device and where that number comes from; None: it is not known.

    On CPU the ranks of a node share the memory that the run asks for.

    Args:
        ranks: of a node; None: the trainer's.
    """
    slurm, ranks = config.slurm, ranks or config.trainer.placement.policy_num_gpus_per_node
    if slurm.gpus == 0:
        if not slurm.mem_gb:
            return None, "a run on CPU; slurm.mem_gb does not say how much memory a node has"
        return slurm.mem_gb * GIB / ranks, f"slurm.mem_gb, shared by {ranks} rank(s)"
    if slurm.gpu_memory_gb is not None:
        return slurm.gpu_memory_gb * GIB, "slurm.gpu_memory_gb"
    found = [(int(size[1]), gpu["name"]) for gpu in gpus_here() if (size := _MIB.fullmatch(gpu["memory"]))]
    if not found:
        return None, "slurm.gpu_memory_gb is not set, and this machine has no GPU"
    least, name = min(found)
    return least * 2.0**20, f"{name} of this machine; set slurm.gpu_memory_gb if the run's are others"
