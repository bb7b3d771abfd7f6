"""Answers requests of `hpcrl doctor` on a compute node, one JSON line each, until its input ends.

python -m hpcrl.launch.doctor.node DIRECTORY

{"verb": "clock"}                                    {"time": ...}
{"verb": "await", "name": "a", "content": "x",       {"sees": false}, and when the file has that content {"sees": true},
     "limit_s": "60"}                                    or {"sees": false} when the time is over
{"verb": "write", "name": "b", "content": "y"}       {"uid": 1000}
{"verb": "facts", "gpus": "1"}                       see `facts`
{"verb": "sandboxes"}                                see `sandboxes_here`
"""

from __future__ import annotations

import json
import os
import pwd
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from hpcrl.config.backend import backends
from hpcrl.launch.setup_lines import failed_setup
from hpcrl.rundir.commit import write_text
from hpcrl.runtime.gpu_memory import nvidia_smi
from hpcrl.runtime.numa import numa_nodes
from hpcrl.runtime.scratch import left_shared_memory, remove_abandoned
from hpcrl.sandboxes.probe import sandbox_facts

PACKAGES = ("hpcrl", "torch", "transformers", "safetensors", "submitit", "pydantic", "tensorboard", "numpy")
CONTAINERS = ("apptainer", "enroot")  # programs that start them
_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")
_POLL_S = 0.02
_TORCH_S = 600.0  # to import it from a shared filesystem that many nodes read at the same time


def facts(
    directory: Path,
    gpus_needed: int = 0,
    devices: Sequence[str] | None = None,
    copies: Path | None = None,
    elsewhere: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Return the facts about this node, as JSON values.

    Args:
        directory: where runs are, or will be; it exists.
        gpus_needed: how many GPUs a run wants here.
        devices: those that its processes get, as CUDA_VISIBLE_DEVICES names them; None: what that variable says, or the first ones.
        copies: where they will copy weights to; None: nowhere.
        elsewhere: folders of the run below other roots, by their names.
    """
    abandoned = remove_abandoned(*filter(None, [copies]))  # first: it makes room
    gpus = gpus_here()
    if devices is None:
        listed = listed_gpus()
        first = [gpu["index"] for gpu in gpus] if not gpus_needed else [str(index) for index in range(gpus_needed)]
        devices = first if listed is None else listed
    places = {"root": directory, "temporary": Path(tempfile.gettempdir()), "memory": Path("/dev/shm")}
    places |= {**(elsewhere or {}), **({"copies": copies} if copies else {})}
    return {
        "host": socket.gethostname(),
        "address": _address(),
        "python": sys.version.split()[0],
        "prefix": sys.prefix,
        "packages": {name: found for name in (*PACKAGES, *_of_engines()) if (found := _version(name))},
        "places": {name: place(path) for name, path in places.items() if path.is_dir()},
        "cores": [len(os.sched_getaffinity(0)), os.cpu_count() or 1],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "ephemeral": [int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()],
        "gpus": gpus,
        "listed": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "devices": list(devices),
        "torch": torch_here(devices) if gpus_needed or (gpus and devices) else None,
        "gpu_processes": gpu_processes(gpus, devices),
        "compiler": _compiler(),
        "nvcc": shutil.which("nvcc"),
        "flashinfer_cubin": find_spec("flashinfer_cubin") is not None,
        "numa": {"nodes": len(numa_nodes()), "numactl": shutil.which("numactl")},
        "python_header": {
            "path": (header := str(Path(sysconfig.get_paths()["include"]) / "Python.h")),
            "there": os.path.exists(header),
        },
        "left": left_shared_memory(),
        "abandoned": [str(path) for path in abandoned],
        "scontrol": shutil.which("scontrol") is not None,
        "nsys": shutil.which("nsys"),
        "containers": [name for name in CONTAINERS if shutil.which(name)],
        "path": os.environ.get("PATH", ""),
        "failed_setup": failed_setup(),
    }


def sandboxes_here() -> dict[str, Any]:
    """Return this host's name, and its facts as of `sandbox_facts`."""
    return {"host": socket.gethostname(), **sandbox_facts()}


def _address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _of_engines() -> list[str]:
    return [name for backend in backends().values() for name in backend.packages]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def place(path: Path) -> dict[str, Any]:
    """Return path, filesystem type, room, inodes and mode of a directory, and whether it can be written; None for inodes that are not counted."""
    room = os.statvfs(path)
    return {
        "path": str(path),
        "type": filesystem(path, Path("/proc/self/mountinfo").read_text(errors="surrogateescape")),
        "free_bytes": room.f_bavail * room.f_frsize,
        "free_inodes": room.f_favail if room.f_files else None,
        "mode": path.stat().st_mode & 0o7777,
        "writable": os.access(path, os.W_OK | os.X_OK),
    }


def filesystem(path: Path, mountinfo: str) -> str:
    """Return the type of the filesystem on which a path lies, such as nfs4 or lustre."""
    real, best, found = os.path.realpath(path), "", "unknown"
    for line in filter(None, mountinfo.split("\n")):
        before, _, after = line.partition(" - ")
        # Blanks of a mount point are written as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, found = point, after.split()[0]
    return found


def gpus_here() -> list[dict[str, str]]:
    """Return index, uuid, name, driver, memory and compute mode of the GPUs that this process may use."""
    names = ("index", "uuid", "name", "driver", "memory", "compute_mode")
    rows = [line.split(", ") for line in nvidia_smi("gpu=index,uuid,name,driver_version,memory.total,compute_mode")]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def gpu_processes(gpus: Sequence[Mapping[str, str]], devices: Sequence[str]) -> list[dict[str, Any]]:
    """Return the processes that compute on these devices: gpu, pid, name, user, and memory in MiB, None where the driver does not say.

    Args:
        gpus: of `gpus_here`.
        devices: as CUDA_VISIBLE_DEVICES names them, by index or by the beginning of the uuid. Those of a MIG device are unknown.
    """
    mine = {
        gpu["uuid"]: device
        for gpu in gpus
        for device in devices
        if gpu["index"] == device or gpu["uuid"].startswith(device)
    }
    found = []
    for line in nvidia_smi("compute-apps=gpu_uuid,pid,used_memory,process_name"):
        uuid, pid, memory, name = (*line.split(", ", 3), "", "", "")[:4]
        if uuid in mine and pid.isdecimal():
            size = re.fullmatch(r"(\d+) MiB", memory)
            one = {
                "gpu": mine[uuid],
                "pid": int(pid),
                "name": name,
                "user": _owner(pid),
                "memory": size and int(size[1]),
            }
            found.append(one)
    return found


def _owner(pid: str) -> str:
    """Return the user of a process, as far as this one may see it: in a container, or with hidepid, it may not."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        return pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        return "somebody"


def _compiler() -> str | None:
    own = os.environ.get("CC")
    return shutil.which(own) if own else shutil.which("gcc") or shutil.which("clang")


def listed_gpus() -> list[str] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES leaves this process, numbers or ids; None where it is not set.

    Empty, it leaves none. As CUDA reads it, the list ends with the first word that names no device, such as -1 or NoDevFiles.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else list(takewhile(_DEVICE.fullmatch, re.split(r"\s*,\s*", listed.strip())))


def torch_here(devices: Sequence[str]) -> dict[str, Any]:
    """Return torch's facts of these devices (hpcrl/launch/doctor/torch_facts.py), or the reason why there are none."""
    command = [sys.executable, "-m", "hpcrl.launch.doctor.torch_facts"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_TORCH_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {_TORCH_S:.0f} s"}
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
            say(facts(directory, int(request.get("gpus", "0"))))
        case "sandboxes":
            say(sandboxes_here())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
