"""What keeps a node that was asked for GPUs from computing on them, found before anything is loaded: it never computes on the CPU instead."""

from __future__ import annotations

import os

from hpcrl.errors import DeviceError
from hpcrl.launch.doctor.node import gpus_here, listed_gpus, torch_here
from hpcrl.launch.nodes import Node

_IMPORT_S = 600.0  # of torch, from a shared filesystem that many nodes read at the same time


def visible_devices(node: Node, shared: bool) -> list[str]:
    """Return the devices that a node's processes may use, as CUDA_VISIBLE_DEVICES names them.

    Where nothing sets that variable, as on a site that lends whole nodes without counting GPUs, these are the first ones of the node.

    Args:
        shared: whether all nodes of the run share this machine, and each takes its part of the devices.
    """
    first = node.gpu_offset if shared else 0
    listed = listed_gpus()
    return [str(device) for device in range(first, first + node.gpus)] if listed is None else listed[first:]


def require_gpus(node: Node, shared: bool) -> None:
    """Make sure that this node can give each of its processes a GPU.

    It takes as long as importing torch in a process of its own.

    Raises:
        DeviceError: it cannot; the message says what Slurm gave, what the driver and torch see, and what to do.
    """
    if not node.gpus:
        return
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    given = "CUDA_VISIBLE_DEVICES is not set" if listed is None else f"CUDA_VISIBLE_DEVICES={listed!r}"
    if (count := len(visible_devices(node, shared))) < node.gpus:
        raise DeviceError(
            f"{node.gpus} GPU(s) are needed on this node, and it was given {count} ({given}): ask for them with "
            "slurm.gpus_per_node, or with slurm.extra where the site counts them by another name"
        )
    torch, gpus = torch_here(_IMPORT_S), gpus_here()
    if "error" in torch:
        raise DeviceError(f"torch cannot be imported on this node: {torch['error']}")
    if torch["devices"] >= node.gpus:
        return
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
    driver = f"driver {gpus[0]['driver']} with {len(gpus)} x {gpus[0]['name']}" if gpus else "nvidia-smi shows no GPU"
    if not torch["cuda"]:
        remedy = "install one that is built with CUDA (docs/installation.md)"
    elif gpus:
        remedy = "the driver may be too old for that CUDA: install a newer driver, or a torch for an older CUDA"
    else:
        remedy = "ask for nodes with GPUs (slurm.partition, slurm.constraint)"
    raise DeviceError(
        f"{node.gpus} GPU(s) are needed on this node, and torch {torch['version']}, {build}, sees {torch['devices']} "
        f"({driver}; {given}): {remedy}; slurm.gpus_per_node=0 is a run on CPUs"
    )
