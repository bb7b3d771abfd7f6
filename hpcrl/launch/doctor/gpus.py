"""Judges a node's GPUs for a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcrl.launch.doctor.finding import Finding, error, ok, warning

_MUCH_MIB = 1024  # what is left of a GPU beside it is less than an engine or a trainer counts on
_SLOW = 0.7


def gpu_findings(
    facts: Mapping[str, Any],
    needed: int,
    compiles: Sequence[str],
    shares: Sequence[str] = (),
    nvcc: Sequence[str] = (),
) -> Iterator[Finding]:
    """Yield whether processes of a run can compute on the GPUs of a node.

    Args:
        needed: how many the run wants there; 0: it wants none, and what is there is only described.
        compiles: what compiles kernels there.
        shares: settings that have two processes use the same GPU.
        nvcc: settings whose kernels CUDA's compiler builds.
    """
    gpus, torch, host = facts["gpus"], facts["torch"], facts["host"]
    if torch is None:  # none is wanted, and none was found
        if facts["devices"]:
            remedy = "its driver does not work, or these GPUs are not NVIDIA's; ask the administrators"
            yield warning("GPU", f"{host} gave {len(facts['devices'])} GPU, but nvidia-smi shows none", remedy)
        else:
            yield ok("GPU", f"none given on {host}", "runs there use the CPU (slurm.gpus_per_node = 0)")
        return
    if unusable := _unusable(facts, max(needed, 1)):
        yield unusable
        return
    one = gpus[0] if gpus else {"name": "GPU", "memory": "memory unknown", "driver": "unknown"}
    found = f"{torch['devices']} x {one['name']}, {one['memory']}, driver {one['driver']} on {host}"
    yield ok("GPU", f"{found}; torch {torch['version']} with CUDA {torch['cuda']}, NCCL {torch['nccl']}")
    yield _multiplication(facts)
    yield from _others(facts)
    yield from _compute_mode(facts, shares)
    if compiles:
        yield _compiler(facts, compiles)
    if nvcc and not facts["nvcc"]:
        yield from _nvcc(facts, nvcc)
    if facts["numa"]["nodes"] > 1 and needed > 1 and not facts["numa"]["numactl"]:
        found = f"{facts['numa']['nodes']} nodes on {facts['host']}, and no program numactl"
        yield warning("NUMA", found, "install it: processes are bound to the cores and the memory near their GPU by it")


def _unusable(facts: Mapping[str, Any], needed: int) -> Finding | None:
    torch, gpus, listed = facts["torch"], facts["gpus"], facts["listed"]
    given = "CUDA_VISIBLE_DEVICES is not set" if listed is None else f"CUDA_VISIBLE_DEVICES={listed!r}"
    wanted = f"{needed} GPU(s) are needed on this node"
    if len(facts["devices"]) < needed:
        remedy = "ask for them with slurm.gpus_per_node, or with slurm.extra where the site counts them by another name"
        return error("GPU", f"{wanted}, and it was given {len(facts['devices'])} ({given})", remedy)
    if needed > 1 and (instances := sum(device.startswith("MIG-") for device in facts["devices"])):
        found = f"{wanted}, and {instances} of those given are MIG instances ({given}): a process sees one of them, and NCCL connects none"
        return error("GPU", found, "ask for whole GPUs, or set slurm.gpus_per_node=1")
    if "error" in torch:
        found = f"torch cannot be imported on this node: {torch['error']}"
        return error("GPU", found, "install it again in this environment (docs/installation.md)")
    if torch["devices"] >= needed:
        return None
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
    driver = f"driver {gpus[0]['driver']} with {len(gpus)} x {gpus[0]['name']}" if gpus else "nvidia-smi shows no GPU"
    if not torch["cuda"]:
        remedy = "install one that is built with CUDA (docs/installation.md)"
    elif gpus:
        remedy = "the driver may be too old for that CUDA: install a newer driver, or a torch for an older CUDA"
    else:
        remedy = "ask for nodes with GPUs (slurm.partition, slurm.constraint)"
    found = f"{wanted}, and torch {torch['version']}, {build}, sees {torch['devices']} ({driver}; {given})"
    return error("GPU", found, f"{remedy}; slurm.gpus_per_node=0 is a run on CPUs")


def _multiplication(facts: Mapping[str, Any]) -> Finding:
    done, devices, subject = facts["torch"]["matmul"], facts["devices"], "matrix product"
    wrong = [
        f"device {devices[index]}: {one.get('error', 'a wrong result')}"
        for index, one in enumerate(done)
        if not one["right"]
    ]
    if wrong:
        remedy = "leave this node out (slurm.extra.exclude) and tell the administrators; `nvidia-smi -q` and dmesg may name the fault"
        return error(subject, "; ".join(wrong), remedy)
    speeds = [one["tflops"] for one in done]
    found = f"right on {len(done)} GPU(s), {min(speeds):.0f} to {max(speeds):.0f} TFLOP/s in bfloat16"
    if min(speeds) < _SLOW * max(speeds):
        slow = devices[speeds.index(min(speeds))]
        remedy = "every step waits for the slowest: look at its clocks and temperature (`nvidia-smi -q -d PERFORMANCE`)"
        return warning(subject, f"{found}; device {slow} is the slowest", remedy)
    return ok(subject, found)


def _others(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Report processes on the GPUs of this run, before it has started any."""
    by_gpu = defaultdict(list)
    for process in facts["gpu_processes"]:
        by_gpu[process["gpu"]].append(process)
    for gpu, processes in by_gpu.items():
        names = ", ".join(
            f"{one['pid']} {one['name']} of {one['user']} ({one['memory']} MiB)" if one["memory"] is not None
            else f"{one['pid']} {one['name']} of {one['user']}"
            for one in processes
        )  # fmt: skip
        found = f"GPU {gpu} of {facts['host']} is used by {names}"
        if sum(one["memory"] or 0 for one in processes) >= _MUCH_MIB:
            remedy = "its memory is not this run's alone: end them if they are yours, tell the administrators if they are left over, or ask for whole nodes (slurm.exclusive)"
            yield error("GPU processes", found, remedy)
        else:
            yield warning("GPU processes", found, "they take little memory; if they compute, both are slow")


def _compute_mode(facts: Mapping[str, Any], shares: Sequence[str]) -> Iterator[Finding]:
    """Report a compute mode of the driver that allows fewer processes per GPU than the run has."""
    modes = {gpu["compute_mode"] for gpu in facts["gpus"]} - {"Default"}
    if not modes or (modes == {"Exclusive_Process"} and not shares):
        return
    found = f"{', '.join(sorted(modes))} on {facts['host']}"
    if settings := ", ".join(shares):
        found += f", and {settings} has two processes use the same GPU"
    remedy = "ask the administrators for the mode Default (`nvidia-smi -c DEFAULT`)"
    yield error("compute mode", found, f"{remedy}, or change {settings}" if settings else remedy)


def _compiler(facts: Mapping[str, Any], compiles: Sequence[str]) -> Finding:
    compiler, header, host = facts["compiler"], facts["python_header"], facts["host"]
    missing = [] if compiler else ["no C compiler (gcc, clang or what CC names)"]
    missing += [] if header["there"] else [f"no {header['path']}"]
    if missing:
        remedy = 'load one in slurm.setup ("module load gcc"), and use a Python that has its headers (python3-devel, or one of conda or uv)'
        found = f"{' and '.join(missing)} on {host}, where Triton builds kernels for {', '.join(compiles)}"
        return error("compiler", found, remedy)
    return ok("compiler", f"{compiler}, and {header['path']}")


def _nvcc(facts: Mapping[str, Any], settings: Sequence[str]) -> Iterator[Finding]:
    found = f"not on the PATH of {facts['host']}, whose torch brings none"
    load = 'load a CUDA toolkit in slurm.setup ("module load cuda")'
    for setting in settings:
        if setting.endswith("use_flashinfer"):
            if not facts["flashinfer_cubin"]:
                yield error("nvcc", found, f"{load}, install flashinfer-cubin, or leave {setting} out")
        else:
            remedy = f"{load}, or set VLLM_USE_DEEP_GEMM=0 in slurm.setup, if engines end in DeepGEMM"
            yield warning("nvcc", f"{found}; {setting} may build kernels of DeepGEMM by it", remedy)
