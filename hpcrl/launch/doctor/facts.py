"""What the facts of a node mean for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.launch.doctor.finding import Finding, error, ok, warning

_GB = 1e9
_SHARED = {
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "glusterfs",
    "orangefs",
    "pvfs2",
    "virtiofs",
}
_DOUBTFUL = {"cifs", "smb3", "afs", "9p", "vboxsf"}
_VOLATILE = {"tmpfs", "ramfs"}
_SCARCE_GB, _LITTLE_GB = 2.0, 50.0
_FEW_INODES = 100_000
_FEW_FILES, _FEWER_FILES = 1024, 8192


def of_node(facts: Mapping[str, Any], gpus_wanted: bool) -> Iterator[Finding]:
    """Say what is well and what is not on a node."""
    host = facts["host"]
    yield from (of_place(name, place, host) for name, place in facts["places"].items())
    yield from _limits(facts)
    yield _network(facts)
    yield from _gpus(facts, gpus_wanted)


def of_place(name: str, place: Mapping[str, Any], host: str) -> Finding:
    """Say whether a directory has a fitting filesystem, room and inodes."""
    kind, room, inodes = place["type"], place["free_bytes"] / _GB, place["free_inodes"]
    subject = {"root": "slurm.root", "temporary": "temporary files", "memory": "shared memory"}[name]
    counted = "inodes not counted" if inodes is None else f"{inodes:,} inodes"
    found = f"{place['path']} on {host}: {kind}, {room:,.1f} GB free, {counted}"
    if name == "memory":
        few = "torch and vLLM pass tensors through it; ask for more memory, or for a larger /dev/shm in the container"
        return warning(subject, found, few) if room < 1 else ok(subject, found)
    if room < _SCARCE_GB:
        return error(subject, found, "make room, or choose another place: a checkpoint holds weights and optimizer")
    if inodes is not None and inodes < _FEW_INODES:
        return warning(
            subject, found, "remove old runs, or choose another place: a run keeps a file per group of samples"
        )
    if name == "temporary":
        return ok(subject, found)
    if kind in _VOLATILE:
        return warning(subject, found, "it is lost with the machine; choose a disk")
    if kind in _DOUBTFUL or kind.startswith("fuse"):
        remedy = "renames and locks may not be what checkpoints need; prefer a filesystem such as Lustre, GPFS or NFS"
        return warning(subject, found, remedy)
    if room < _LITTLE_GB:
        return warning(subject, found, "room for small models only; a checkpoint holds about 16 bytes per parameter")
    notes = "quotas do not show here: " + {"lustre": "`lfs quota -hu $USER`"}.get(kind, "`quota -s`")
    if kind == "lustre":
        notes += "; `lfs setstripe -c 4 -S 4M` on slurm.root makes large checkpoints faster"
    return ok(subject, found, notes if kind in _SHARED else "")


def _limits(facts: Mapping[str, Any]) -> Iterator[Finding]:
    files, subject = facts["open_files"], "open files"
    found = f"at most {files:,} per process on {facts['host']}" if files >= 0 else "unlimited"
    remedy = 'add "ulimit -n 65536" to slurm.setup, and ask the administrators if it is refused'
    if 0 <= files < _FEW_FILES:
        yield error(subject, found, remedy)
    elif 0 <= files < _FEWER_FILES:
        yield warning(subject, found, remedy)
    else:
        yield ok(subject, found)
    locked = facts["locked_memory"]
    if facts["gpus"] and 0 <= locked < 1 << 30:
        remedy = "NCCL over InfiniBand needs it unlimited; ask the administrators (LimitMEMLOCK of slurmd)"
        yield warning("locked memory", f"{locked:,} bytes on {facts['host']}", remedy)


def _network(facts: Mapping[str, Any]) -> Finding:
    first, last = facts["ephemeral"]
    address, host = facts["address"], facts["host"]
    if address is None or address.startswith("127."):
        remedy = "set slurm.network_interface to the cluster's network (`ip -br address` lists them)"
        return error("network", f"the name {host} leads to {address or 'no address'} there", remedy)
    found = f"{host} is {address}; the kernel gives clients ports {first} to {last}"
    if first <= 11000:
        return warning(
            "network", found, "servers take ports below that range, and few are left; hpcrl uses 1024 and up"
        )
    return ok("network", found, f"servers choose free ports from 10000 to {first - 1}")


def _gpus(facts: Mapping[str, Any], wanted: bool) -> Iterator[Finding]:
    gpus, torch, host = facts["gpus"], facts["torch"], facts["host"]
    if not gpus:
        if wanted:
            remedy = "its driver does not work, or these GPUs are not NVIDIA's; ask the administrators"
            yield warning("GPU", f"{host} gave {facts['given_gpus']} GPU, but nvidia-smi shows none", remedy)
        else:
            yield ok("GPU", f"none on {host}", "runs there use the CPU (slurm.gpus_per_node = 0)")
        return
    one = gpus[0]
    found = f"{len(gpus)} x {one['name']}, {one['memory']}, driver {one['driver']} on {host}"
    if torch is None or "error" in torch:
        yield error(
            "GPU", f"{found}; torch: {torch['error'] if torch else 'not asked'}", "reinstall torch in this environment"
        )
    elif not torch["devices"]:
        built = f"was built for CUDA {torch['cuda']}" if torch["cuda"] else "is a build for CPUs"
        yield error("GPU", f"{found}; torch {built} and sees no device", "install a torch that fits the driver")
    else:
        yield ok("GPU", f"{found}; torch with CUDA {torch['cuda']}, NCCL {torch['nccl']}")


def of_both(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[Finding]:
    """Say whether this machine and a compute node have the same environment."""
    node = there["host"]
    differing = [
        f"{name} {here['packages'].get(name, 'missing')} here, {there['packages'].get(name, 'missing')} on {node}"
        for name in sorted({*here["packages"], *there["packages"]})
        if here["packages"].get(name) != there["packages"].get(name)
    ]
    if here["python"] != there["python"]:
        differing.insert(0, f"Python {here['python']} here, {there['python']} on {node}")
    if differing:
        remedy = "use one environment on a filesystem that all nodes share"
        yield error("environment", "; ".join(differing), remedy)
    else:
        versions = ", ".join(f"{name} {found}" for name, found in there["packages"].items())
        yield ok(
            "environment", f"{there['prefix']} is the same here and on {node}: Python {there['python']}, {versions}"
        )
    if not there["scontrol"]:
        remedy = "a preempted run requeues itself from its first node; have Slurm's client programs installed there"
        yield error("scontrol", f"not on {node}", remedy)


def of_clock(skew_s: float, uncertainty_s: float, node: str) -> Finding:
    """Say whether the clocks of this machine and of a node agree. Positive: the node is ahead."""
    found = (
        f"{node} is {abs(skew_s):.2f} s {'ahead of' if skew_s > 0 else 'behind'} this machine (± {uncertainty_s:.2f} s)"
    )
    if abs(skew_s) - uncertainty_s > 2:
        remedy = (
            "results do not depend on it, but times in logs and in `hpcrl status` do; ask the administrators for chrony"
        )
        return warning("clock", found, remedy)
    return ok("clock", found)
