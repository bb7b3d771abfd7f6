"""The part of `hpcrl doctor` that runs on a compute node: it answers requests, one JSON line each, until its input ends.

python -m hpcrl.launch.doctor.node DIRECTORY

{"verb": "clock"}                                    {"time": ...}
{"verb": "await", "name": "a", "content": "x",       {"sees": false}, and when the file has that content {"sees": true},
     "limit_s": "60"}                                    or {"sees": false} when the time is over
{"verb": "write", "name": "b", "content": "y"}       {"uid": 1000}
{"verb": "facts"}                                    see `facts`
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpcrl.rundir.commit import write_text

PACKAGES = ("hpcrl", "torch", "vllm", "transformers", "safetensors", "submitit", "pydantic", "tensorboard", "numpy")
_POLL_S = 0.02
_TORCH_S = 120.0
_TORCH = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "nccl": nccl and ".".join(map(str, nccl)),
}))
"""


def facts(directory: Path) -> dict[str, Any]:
    """Return what is to be known about this node, as JSON values.

    Args:
        directory: where runs are, or will be; it exists.
    """
    gpus = gpus_here()
    places = {"root": directory, "temporary": Path(os.environ.get("TMPDIR", "/tmp")), "memory": Path("/dev/shm")}
    return {
        "host": socket.gethostname(),
        "address": _address(),
        "python": sys.version.split()[0],
        "prefix": sys.prefix,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "places": {name: place(path) for name, path in places.items() if path.is_dir()},
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "ephemeral": [int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()],
        "gpus": gpus,
        "given_gpus": len(listed_gpus() or []),
        "torch": torch_here() if gpus else None,
        "scontrol": shutil.which("scontrol") is not None,
    }


def _address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def place(path: Path) -> dict[str, Any]:
    """Return path, filesystem type, room and inodes of a directory; None for inodes that are not counted."""
    room = os.statvfs(path)
    return {
        "path": str(path),
        "type": filesystem(path, Path("/proc/self/mountinfo").read_text()),
        "free_bytes": room.f_bavail * room.f_frsize,
        "free_inodes": room.f_favail if room.f_files else None,
        "mode": path.stat().st_mode & 0o7777,
    }


def filesystem(path: Path, mountinfo: str) -> str:
    """Return the type of the filesystem on which a path lies, such as nfs4 or lustre."""
    real, best, found = os.path.realpath(path), "", "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        # Blanks of a mount point are written as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, found = point, after.split()[0]
    return found


def gpus_here() -> list[dict[str, str]]:
    """Return name, driver and memory of the GPUs that this process may use."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows if len(row) == 3]


def listed_gpus() -> list[str] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES leaves this process, numbers or ids; None where it is not set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else [device.strip() for device in listed.split(",") if device.strip()]


def torch_here(limit_s: float = _TORCH_S) -> dict[str, Any]:
    """Return what torch says of CUDA, or why it says nothing, from a process of its own: the import may take long, or crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"error": f"import torch took more than {limit_s:.0f} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def sees(path: Path, content: str) -> bool:
    """Return whether a file has this content, after a fresh listing of its directory."""
    try:
        os.listdir(path.parent)
        return path.read_text() == content
    except OSError:
        return False


def await_file(path: Path, content: str, limit_s: float) -> bool:
    """Wait until a file has this content; return whether it came in time."""
    deadline = time.monotonic() + limit_s
    while not (seen := sees(path, content)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return seen


def main(directory: Path) -> None:
    for line in sys.stdin:
        _answer(directory, json.loads(line))


def _answer(directory: Path, request: Mapping[str, str]) -> None:
    def say(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), flush=True)

    path = directory / request.get("name", "")
    match request["verb"]:
        case "clock":
            say({"time": time.time()})
        case "await":
            say({"sees": sees(path, request["content"])})
            say({"sees": await_file(path, request["content"], float(request["limit_s"]))})
        case "write":
            write_text(path, request["content"])
            say({"uid": path.stat().st_uid})
        case "facts":
            say(facts(directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
