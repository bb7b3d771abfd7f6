"""Binds the processes of each GPU to the NUMA nodes near it.

torchrun and vLLM bind their processes by the program `numactl`, and fail where they cannot. Each condition of theirs is looked at here
beforehand, in sysfs and by `nvidia-smi`, which needs no CUDA context.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hpcrl.runtime.gpu_memory import nvidia_smi

SYSFS = Path("/sys")
_LEAST = 0.5  # of a node's cores that this process may use; a binding would take too many of the others away


def numa_nodes() -> list[int]:
    """Return the numbers of the machine's NUMA nodes that have cores."""
    found = (SYSFS / "devices/system/node").glob("node[0-9]*")
    return sorted(int(path.name.removeprefix("node")) for path in found if _cores(path))


def nodes_of_gpus(visible: str) -> list[int] | None:
    """Return the NUMA node of each visible device; None where no process is to be bound to one.

    That is so without `numactl`, for MIG devices, and where this process may use few cores of a node. It is also so where all GPUs are near
    one node or the machine does not show their places.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the processes; devices by index or by the beginning of the uuid.
    """
    devices = [device for device in visible.split(",") if device]
    if shutil.which("numactl") is None or len(usable := _usable()) < 2:
        return None
    near = dict[tuple[str, str], int]()
    for line in nvidia_smi("gpu=index,uuid,pci.bus_id"):
        index, uuid, address = (*line.split(", "), "", "")[:3]
        near[index, uuid] = _node_of(address)
    if len(set(near.values())) < 2 or not set(near.values()) <= usable:
        return None
    found = [
        node for device in devices for (index, uuid), node in near.items() if index == device or uuid.startswith(device)
    ]
    return found if found and len(found) == len(devices) else None


def _usable() -> set[int]:
    """Return the NUMA nodes of whose cores this process may use at least half."""
    mine = os.sched_getaffinity(0)
    cores = {node: _cores(SYSFS / f"devices/system/node/node{node}") for node in numa_nodes()}
    return {node for node, own in cores.items() if len(own & mine) >= _LEAST * len(own)}


def _cores(node: Path) -> set[int]:
    found = set[int]()
    for part in filter(None, (node / "cpulist").read_text().strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _node_of(address: str) -> int:
    """Return the NUMA node of a PCI address as nvidia-smi writes it, such as 00000000:3B:00.0; -1 where the machine does not say."""
    domain, _, rest = address.lower().partition(":")
    try:
        return int((SYSFS / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return -1
