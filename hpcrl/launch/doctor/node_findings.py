"""Judges the facts of a node for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.launch.doctor.disk_space import DiskNeed
from hpcrl.launch.doctor.finding import Finding, error, ok, warning
from hpcrl.launch.doctor.gpus import gpu_findings
from hpcrl.units import readable_size

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
SUBJECTS = {
    "root": "slurm.root",
    "checkpoints": "slurm.checkpoint_root",
    "exports": "slurm.export_root",
    "tensorboard": "slurm.tensorboard_root",
    "temporary": "temporary files",
    "memory": "shared memory",
    "copies": "copies of weights",
}
_SCARCE_GB, _LITTLE_GB = 2.0, 50.0
_FEW_INODES = 100_000
_FEW_FILES, _FEWER_FILES = 1024, 8192
_EXCHANGED = ("hpcrl", "submitit")


@dataclass(frozen=True)
class Purpose:
    """Requirements of a run on a node.

    Attributes:
        gpus: how many GPUs; 0: none.
        compiles: vLLM, or settings of the trainer, that compile kernels there.
        shares: settings that have two processes use the same GPU.
        nvcc: settings whose kernels CUDA's compiler builds.
        named: whether other nodes reach it by its name.
        requeues: whether a job is requeued from there.
        nsys: whether Nsight Systems records its processes.
        containers: program that starts containers of agents there; none: there are no such.
        rooms: bytes that it will write, by the name of the directory, as far as they are known.
    """

    gpus: int = 0
    compiles: Sequence[str] = ("vLLM",)
    shares: Sequence[str] = ()
    nvcc: Sequence[str] = ()
    named: bool = True
    requeues: bool = False
    nsys: bool = False
    containers: str = "none"
    disk_needs: Mapping[str, DiskNeed] = field(default_factory=dict)


def findings_of_node(facts: Mapping[str, Any], purpose: Purpose) -> Iterator[Finding]:
    """Yield the findings about a node: filesystems, limits, network, programs, leftovers and GPUs."""
    host = facts["host"]
    yield from (
        filesystem_finding(name, place, host, purpose.disk_needs.get(name)) for name, place in facts["places"].items()
    )
    yield from _limits(facts)
    if facts["failed_setup"]:
        remedy = 'the job goes on without it; where bash does not find `module`, begin slurm.setup with "source /etc/profile"'
        yield warning("slurm.setup", f"{facts['failed_setup']} failed on {host}", remedy)
    if purpose.named:
        yield _network(facts)
    if purpose.requeues and not facts["scontrol"]:
        remedy = "a preempted run requeues itself from its first node; have Slurm's client programs there, also in a container"
        yield warning("scontrol", f"not on {host}", remedy)
    if purpose.nsys and not facts["nsys"]:
        remedy = "trainer.profiler.enable_nsys starts processes under it: load the module that has it in slurm.setup (nsight-systems, cuda), or add its bin to PATH there"
        yield error("nsys", f"not on the PATH of {host} ({facts['path']})", remedy)
    if purpose.containers != "none" and purpose.containers not in facts["containers"]:
        remedy = "environment.skyrl_gym.agent.container.kind starts agents with it: load the module that has it in slurm.setup, or add its bin to PATH there"
        yield error(purpose.containers, f"not on the PATH of {host} ({facts['path']})", remedy)
    if facts["abandoned"]:
        yield ok("left over", f"removed on {host}, of processes that were killed: {', '.join(facts['abandoned'])}")
    if left := facts["left"]:
        found = f"{len(left)} segments ({readable_size(sum(left.values()))}) in /dev/shm of {host} that no process uses, such as {min(left)}"
        remedy = "processes of yours that were killed left them; remove them if none of yours runs in another container there"
        yield warning("left over", found, remedy)
    yield from gpu_findings(facts, purpose.gpus, purpose.compiles, purpose.shares, purpose.nvcc)


def filesystem_finding(name: str, place: Mapping[str, Any], host: str, needed: DiskNeed | None = None) -> Finding:
    """Return whether a directory has a suitable filesystem, free space and inodes.

    Args:
        needed: bytes that a run will write there; None: unknown.
    """
    kind, room, inodes = place["type"], place["free_bytes"] / _GB, place["free_inodes"]
    subject = SUBJECTS[name]
    counted = "inodes not counted" if inodes is None else f"{inodes:,} inodes"
    found = f"{place['path']} on {host}: {kind}, {room:,.1f} GB free, {counted}"
    if name == "memory":
        few = "torch and vLLM pass tensors through it; ask for more memory, or for a larger /dev/shm in the container"
        return warning(subject, found, few) if room < 1 else ok(subject, found)
    if name != "temporary" and not place["writable"]:
        return error(subject, found, "you cannot write there; choose another directory")
    if name == "tensorboard":  # some megabytes
        return ok(subject, found)
    if name == "copies":
        if needed is None or place["free_bytes"] >= needed.most:
            return ok(subject, found)
        few = "make room, or choose another directory: without a copy engines read each version from slurm.root"
        return warning(subject, f"{found}; {needed.what} take about {readable_size(needed.most)}", few)
    if needed and place["free_bytes"] < needed.most:
        found += (
            f"; {needed.what} take about {readable_size(needed.least)}, all that is kept {readable_size(needed.most)}"
        )
        remedy = "make room (`hpcrl checkpoint ls` and `rm`, exports/), choose another place, or lower trainer.max_ckpts_to_keep"
        return (error if needed.required and place["free_bytes"] < needed.least else warning)(subject, found, remedy)
    if name == "temporary":
        remedy = "make room, or set TMPDIR to another place: compiled kernels of engines and sockets lie there"
        return warning(subject, found, remedy) if room < _SCARCE_GB else ok(subject, found)
    if needed is None and room < _SCARCE_GB:
        return error(subject, found, "make room, or choose another place: a checkpoint holds weights and optimizer")
    if inodes is not None and inodes < _FEW_INODES:
        return warning(
            subject, found, "remove old runs, or choose another place: a run keeps a file per group of samples"
        )
    if kind in _VOLATILE:
        return warning(subject, found, "it is lost with the machine; choose a disk")
    if kind in _DOUBTFUL or kind.startswith("fuse"):
        remedy = "renames and locks may not be what checkpoints need; prefer a filesystem such as Lustre, GPFS or NFS"
        return warning(subject, found, remedy)
    if needed is None and room < _LITTLE_GB:
        return warning(subject, found, "room for small models only; a checkpoint holds about 16 bytes per parameter")
    notes = "quotas do not show here: " + {"lustre": "`lfs quota -hu $USER`"}.get(kind, "`quota -s`")
    if kind == "lustre":
        notes += "; `lfs setstripe -c 4 -S 4M` on slurm.root makes large checkpoints faster"
    return ok(subject, found, notes if kind in _SHARED else "")


def _limits(facts: Mapping[str, Any]) -> Iterator[Finding]:
    usable, cores = facts["cores"]
    found = f"{usable} of {cores} usable on {facts['host']}"
    if usable == 1 < cores:
        remedy = "the site binds tasks to cores: set slurm.cpus_per_task, or ask for whole nodes (slurm.exclusive)"
        yield warning("cores", found, remedy)
    else:
        yield ok("cores", found)
    files, subject = facts["open_files"], "open files"
    found = f"at most {files:,} per process on {facts['host']}" if files >= 0 else "unlimited"
    remedy = "this is the hard limit (`ulimit -Hn`); ask the administrators for 65,536 (LimitNOFILE of slurmd, where Slurm starts the run)"
    if 0 <= files < _FEW_FILES:
        yield error(subject, found, remedy)
    elif 0 <= files < _FEWER_FILES:
        yield warning(subject, found, remedy)
    else:
        yield ok(subject, found)
    locked = facts["locked_memory"]
    if facts["torch"] and 0 <= locked < 1 << 30:
        remedy = "NCCL over InfiniBand needs it unlimited; ask the administrators (LimitMEMLOCK of slurmd, where Slurm starts the run)"
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


def environment_findings(here: Mapping[str, Any], there: Mapping[str, Any], other: bool = False) -> Iterator[Finding]:
    """Yield whether this machine and a compute node have the same environment.

    Args:
        other: the node's is that of a container or of slurm.python, of which only what both sides exchange has to be the same.
    """
    node = there["host"]
    differing = [
        f"{name} {here['packages'].get(name, 'missing')} here, {there['packages'].get(name, 'missing')} on {node}"
        for name in sorted(_EXCHANGED if other else {*here["packages"], *there["packages"]})
        if here["packages"].get(name) != there["packages"].get(name)
    ]
    if not other and here["python"] != there["python"]:
        differing.insert(0, f"Python {here['python']} here, {there['python']} on {node}")
    if differing:
        remedy = "use one environment on a filesystem that all nodes share"
        if other:
            remedy = "install the same versions in the jobs' environment (docs/containers.md, docs/administrators.md)"
        yield error("environment", "; ".join(differing), remedy)
    else:
        versions = ", ".join(f"{name} {found}" for name, found in there["packages"].items())
        yield ok(
            "environment",
            f"{there['prefix']} {'of the jobs' if other else 'is the same here and'} on {node}: Python {there['python']}, {versions}",
        )


def clock_finding(skew_s: float, uncertainty_s: float, node: str) -> Finding:
    """Return whether the clocks of this machine and of a node agree. Positive: the node is ahead."""
    found = (
        f"{node} is {abs(skew_s):.2f} s {'ahead of' if skew_s > 0 else 'behind'} this machine (± {uncertainty_s:.2f} s)"
    )
    if abs(skew_s) - uncertainty_s > 2:
        remedy = (
            "results do not depend on it, but times in logs and in `hpcrl status` do; ask the administrators for chrony"
        )
        return warning("clock", found, remedy)
    return ok("clock", found)
