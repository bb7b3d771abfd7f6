"""Finds the devices of a node's processes."""

from __future__ import annotations

from hpcrl.launch.doctor.node import listed_gpus
from hpcrl.launch.nodes import Node


def visible_devices(node: Node, shared: bool) -> list[str]:
    """Return the devices that a node's processes may use, as CUDA_VISIBLE_DEVICES names them.

    Where nothing sets that variable, as on a site that lends whole nodes without counting GPUs, these are the first ones of the node.

    Args:
        shared: whether all nodes of the run share this machine, and each takes its part of the devices.
    """
    first = node.gpu_offset if shared else 0
    listed = listed_gpus()
    return [str(device) for device in range(first, first + node.gpus)] if listed is None else listed[first:]
