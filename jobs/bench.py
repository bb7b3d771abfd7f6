"""Measures the nodes of a bench: one process for each GPU, or for each node without any, started by srun or `hpcrl bench --local`.

consumes   bench.toml of the folder (hpcrl/launch/bench/folder.py); RANK, WORLD_SIZE and LOCAL_RANK of the environment
waits for  meeting.json of the first rank; the other ranks
produces   nodes.json; engine.log; model/, random weights of the largest shape that fits, where the configuration names it and it is not there
ends       with 0 once all is written
"""

from __future__ import annotations

from hpcrl.runtime.signals import die_with_parent, end_process

if __name__ == "__main__":
    die_with_parent()

import gc
import os
import platform
import shutil
import socket
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpcrl.config import Config
from hpcrl.errors import HpcrlError
from hpcrl.launch.agent.network import choose_port, node_address
from hpcrl.launch.bench.folder import Bench, Nodes
from hpcrl.launch.bench.models import SHAPES, fitting
from hpcrl.launch.doctor.node import await_file
from hpcrl.launch.doctor.torch_facts import multiply
from hpcrl.rollout.engines.by_length import engine_speed_by_length
from hpcrl.rundir.commit import read_bytes, read_json, write_bytes, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World, check_all_reduce, joined
from hpcrl.trainer.profiling.by_length import speed_by_length

_MEET_S, _SEEN_S = 120.0, 60.0
_LARGE, _SMALL = 1 << 30, 1 << 26  # bytes that each node writes: of a bench on GPUs, and without
_BLOCK = 1 << 23
_OPERATIONS, _SYNCS, _REPLACED = 200, 20, 200
_TORN = 1 << 16


def main(folder: str) -> None:
    bench = Bench(Path(folder))
    config = Config.from_toml([bench.config]).largest()
    _meet(bench, config)
    with joined(on_gpu=config.slurm.gpus > 0) as world:
        bandwidth = check_all_reduce(world)
        product = multiply(world.device)
        hosts = list(dict.fromkeys(world.all_gather(socket.gethostname)))
        products = world.all_gather(lambda: product)
        found = _filesystem(bench, world, _LARGE if config.slurm.gpus else _SMALL)
        world.rank0_broadcast(lambda: _make_model(bench, config, world))
        by_length = speed_by_length(config, world)
        _free_devices()
        world.barrier()
        generated = world.rank0_broadcast(lambda: _generated(bench, config))
        if world.first:
            nodes = Nodes(
                hosts=hosts,
                ranks=world.size,
                device=_device(world.device),
                bus_bandwidth=bandwidth / 1e9,
                tflops=min(one["tflops"] for one in products),
                wrong=[str(one.get("error", "wrong result")) for one in products if not one["right"]],
                tokens_per_second={str(length): speed for length, (speed, _) in by_length.items()},
                mfu={str(length): mfu for length, (_, mfu) in by_length.items() if mfu},
                generated_per_second=generated,
                **found,
            )
            write_json(bench.nodes, asdict(nodes))
    end_process()


def _meet(bench: Bench, config: Config) -> None:
    """Set the address of the first rank in the environment; it writes that into a file, which the others await.

    Raises:
        HpcrlError: the file does not appear.
    """
    if os.environ["RANK"] == "0":
        local = os.environ.get("SLURM_JOB_ID") is None
        address = "127.0.0.1" if local else node_address(config.slurm.network_interface)
        write_json(bench.meeting, {"address": address, "port": choose_port(address)})
    deadline = time.monotonic() + _MEET_S
    while (meeting := read_json(bench.meeting)) is None:
        if time.monotonic() > deadline:
            raise HpcrlError(
                f"{socket.gethostname()} does not see {bench.meeting} after {_MEET_S:.0f} s: slurm.root must lie on a filesystem that all nodes share"
            )
        os.listdir(bench.path)
        time.sleep(0.1)
    os.environ |= {"MASTER_ADDR": meeting["address"], "MASTER_PORT": str(meeting["port"])}


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _filesystem(bench: Bench, world: World, size: int) -> dict[str, Any]:
    """Return the figures of the filesystem with the folder, as fields of `Nodes`; all ranks call it.

    One rank of each node works, all of them at the same time; with one node its first two ranks.
    """
    actors = [rank for rank, local in enumerate(world.all_gather(lambda: int(os.environ["LOCAL_RANK"]))) if local == 0]
    actors = actors if len(actors) > 1 else list(range(min(2, world.size)))
    place = actors.index(world.rank) if world.rank in actors else None
    own, other = (bench.probe(place), bench.probe((place + 1) % len(actors))) if place is not None else (None, None)
    if own:
        own.mkdir(parents=True, exist_ok=True)
    world.barrier()
    found: dict[str, Any] = {"written_bytes": size * len(actors)}
    for name, work in (
        ("write_seconds", lambda: own and _write(own / "large", size)),
        ("read_seconds", lambda: other and _read(other / "large")),
        ("operation_seconds", lambda: own and _operations(own)),
    ):
        found[name] = _slowest(world, work)
    found["operations"] = 4 * _OPERATIONS * len(actors)
    found["sync_seconds"] = max(world.all_gather(lambda: _syncs(own) if own else 0.0))
    found["seen_seconds"] = max(_seen(bench, world, actors, content) for content in ("new", "replaced"))
    found["reads"], found["torn"] = _torn(bench, world, actors)
    world.barrier()
    if own:
        shutil.rmtree(own)
    return found


def _slowest(world: World, work: Any) -> float:
    world.barrier()
    began = time.perf_counter()
    work()
    return world.max([time.perf_counter() - began])[0]


def _write(path: Path, size: int) -> None:
    block = os.urandom(_BLOCK)
    with path.open("wb") as file:
        for _ in range(size // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(_BLOCK):
            pass


def _operations(folder: Path) -> None:
    """Make, look at, rename and remove files."""
    for number in range(_OPERATIONS):
        path, renamed = folder / f"{number}", folder / f"{number}.renamed"
        path.touch()
        path.stat()
        path.rename(renamed)
        renamed.unlink()


def _syncs(folder: Path) -> float:
    """Return the median seconds until a small file is on the disk, under its name."""
    seconds = []
    for number in range(_SYNCS):
        began = time.perf_counter()
        write_text(folder / "small", str(number))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _seen(bench: Bench, world: World, actors: list[int], content: str) -> float:
    """Return the seconds from the write of the first of these ranks until the last of them sees the file.

    Raises:
        HpcrlError: it does not see it.
    """
    path = bench.probe(0) / "seen"
    if world.rank == actors[-1]:
        await_file(path, content, 0.0)  # so that the node has the directory, and the old file, in its cache
    world.barrier()
    began = time.perf_counter()
    if world.rank == actors[0]:
        write_text(path, content)
    seen = world.rank != actors[-1] or await_file(path, content, _SEEN_S)
    seconds = time.perf_counter() - began if world.rank == actors[-1] else 0.0
    if not all(world.all_gather(lambda: seen)):
        raise HpcrlError(
            f"{path} is not seen on another node after {_SEEN_S:.0f} s: slurm.root must lie on a filesystem that all nodes share"
        )
    return max(world.all_gather(lambda: seconds))


def _torn(bench: Bench, world: World, actors: list[int]) -> tuple[int, int]:
    """Return how often the other ranks read a file while the first one replaced it, and how many of the reads had parts of two files."""
    path, reads, torn = bench.probe(0) / "torn", 0, 0
    if world.rank == actors[0]:
        write_bytes(path, b"\0" * _TORN)
    world.barrier()
    if world.rank == actors[0]:
        for number in range(1, _REPLACED):
            write_bytes(path, bytes([number % 251 + 1]) * _TORN)
        write_bytes(path, b"\xff" * _TORN)
    elif world.rank in actors:
        deadline, last = time.monotonic() + _SEEN_S, b""
        while last[:1] != b"\xff" and time.monotonic() < deadline:
            last = read_bytes(path) or b""
            reads += 1
            torn += len(last) != _TORN or last.count(last[:1]) != _TORN
    counts = world.all_gather(lambda: [reads, torn])
    return sum(each[0] for each in counts), sum(each[1] for each in counts)


def _free_devices() -> None:
    """Give the memory of the policy back, which the engine needs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _generated(bench: Bench, config: Config) -> dict[str, float]:
    found = engine_speed_by_length(config, Run(bench.path), bench.engine_log)
    return {f"{prompt}_{completion}": speed for (prompt, completion), speed in found.items()}


def _make_model(bench: Bench, config: Config, world: World) -> None:
    """Write a random model that fits, beside the tokenizer that is there, where the configuration trains one that is not there."""
    if config.trainer.policy.model.path != str(bench.model) or (bench.model / "config.json").exists():
        return
    from transformers import Qwen3Config, Qwen3ForCausalLM

    memory = torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else 0
    shape = SHAPES[fitting(memory * config.trainer.placement.policy_ranks)]
    torch.manual_seed(0)
    with world.device:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.bfloat16().save_pretrained(bench.model)


if __name__ == "__main__":
    main(sys.argv[1])
