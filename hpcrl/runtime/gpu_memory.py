"""Reads GPU memory by `nvidia-smi`, for processes that have no CUDA context and should not spend memory on one."""

from __future__ import annotations

import os
import subprocess

from hpcrl.units import readable_size


def nvidia_smi(query: str) -> list[str]:
    """Return the lines of `nvidia-smi --query-<query>`; none where there is no such program, or it fails."""
    try:
        command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def describe_memory() -> str:
    """Return the free memory of the GPUs of CUDA_VISIBLE_DEVICES, as an addition to an error; empty where it is unknown."""
    mine = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    found = list[str]()
    for line in nvidia_smi("gpu=index,uuid,memory.free,memory.total"):
        index, uuid, *sizes = line.split(", ")
        numbers = [size.removesuffix(" MiB") for size in sizes]
        if any(index == device or uuid.startswith(device) for device in mine) and all(map(str.isdecimal, numbers)):
            free, total = (readable_size(int(number) << 20) for number in numbers)
            found.append(f"GPU {index}: {free} of {total} free")
    return f", {', '.join(found)}" if found else ""
