"""Process groups of the trainer's ranks: joining, agreeing, leaving.

Ranks never act on local observations (a file, a signal, the controller's answer): rank 0 broadcasts its own (`rank0_broadcast`), or all
reduce theirs (`any_rank`).
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from hpcrl import errors
from hpcrl.config.sections.slurm import PatienceConfig
from hpcrl.errors import DeviceError, HpcrlError

Json = Any

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LEAST = timedelta(hours=2)  # rank 0 may hash a large checkpoint, unwatched, while the others wait
_NUMBERS_ON_GPU, _NUMBERS_ON_CPU = 1 << 26, 1 << 18  # 256 MiB and 1 MiB of float32
_ROUNDS = 5
_LATER, _NEVER = timedelta(minutes=5), timedelta(days=365)


@dataclass(frozen=True)
class World:
    """Trainer ranks that work together: all ranks, or those with the same models.

    Attributes:
        device: of this rank.
        control: gloo group of these ranks for small messages, whatever carries the tensors.
        is_leader: of the ranks that train the same samples, the one that writes their records.
        timeout: of each collective, for groups that are made later.
        tensors: group of these ranks that carries tensors; None: torch's own, of all ranks.
        sample_group: where several ranks share the tokens of each sample, the group of the ranks with this one's samples, for tensors; None:
            each rank has its own samples, or the backend knows.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup
    is_leader: bool = True
    timeout: timedelta = _LEAST
    tensors: dist.ProcessGroup | None = None
    sample_group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        dist.barrier(self.control)

    def rank0_broadcast(self, what: Callable[[], Json]) -> Json:
        """Return on every rank what `what` gives on rank 0, where alone it is called; a HpcrlError is raised on every rank."""
        return _value(
            broadcast_json(_answer(what) if self.first else {}, dist.get_global_rank(self.control, 0), self.control)
        )

    def all_gather(self, what: Callable[[], Json]) -> list[Json]:
        """Return on every rank what `what` gives on each, by rank; a HpcrlError of one rank is raised on every rank.

        `what` must not wait for other ranks: they may have failed.
        """
        text = json.dumps(_answer(what)).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self.control)
        longest = max(int(size) for size in sizes)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8), group=self.control)
        return [_value(answer) for answer in [json.loads(found.numpy().tobytes()) for found in texts]]

    def with_new_group(self) -> World:
        """Return the same ranks with another control group, for a thread that talks while this one does. All ranks call it."""
        return replace(self, control=_control(self.timeout))

    def part(self, sizes: Sequence[int]) -> World:
        """Return this rank's part of the ranks, which are divided into parts of these sizes. All ranks call it."""
        own, first = self, 0
        for size in sizes:
            ranks = list(range(first, first + size))
            control, tensors = _control(self.timeout, ranks), _new_group(None, self.timeout, ranks)
            if self.rank in ranks:
                own = replace(self, rank=self.rank - first, size=size, control=control, tensors=tensors)
            first += size
        return own

    def sharing(self, size: int) -> World:
        """Return the data-parallel ranks, where `size` consecutive ranks share each sample. All ranks call it."""
        if size == 1:
            return self
        assert self.size % size == 0, f"{size} ranks cannot share each sample among {self.size}"
        ranks = dist.get_process_group_ranks(self.control)
        return replace(
            self,
            rank=self.rank // size,
            size=self.size // size,
            control=self.group_among([ranks[place::size] for place in range(size)], "gloo"),
            is_leader=self.is_leader and self.rank % size == 0,
            sample_group=self.group_among([ranks[first : first + size] for first in range(0, self.size, size)]),
        )

    def group_among(self, rows: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
        """Return the group of this rank's row, where `rows` divides these ranks. All ranks call it."""
        if self.tensors is None:
            mine, _ = dist.new_subgroups_by_enumeration(rows, timeout=self.timeout, backend=backend)
        else:  # other ranks do not come; the name that such a group gets counts on that these have made the same groups so far
            row = next(row for row in rows if dist.get_rank() in row)
            mine = dist.new_group(row, timeout=self.timeout, backend=backend, use_local_synchronization=True)
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank."""
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        return bool(flags.item())

    def begin_any_rank(self, flag: bool) -> Callable[[], bool | None]:
        """Begin `any_rank`; what is returned gives its answer, or None as long as not all ranks have begun it."""
        flags = torch.tensor(int(flag))
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control, async_op=True)
        assert work is not None

        def answer() -> bool | None:
            if not work.is_completed():
                return None
            work.wait()  # raises what went wrong
            return bool(flags.item())

        return answer

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sums over all ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maxima over all ranks."""
        highest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.control)
        return highest.tolist()


def broadcast_json(value: Json, src: int, group: dist.ProcessGroup) -> Json:
    """Broadcast a value from the global rank `src` to every rank of `group`."""
    # JSON and not broadcast_object_list, which would unpickle what comes from a socket
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor(len(text))
    dist.broadcast(size, src=src, group=group)
    if dist.get_rank() != src:
        text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, src=src, group=group)
    return json.loads(text.numpy().tobytes())


def _answer(what: Callable[[], Json]) -> dict[str, Any]:
    try:
        return {"value": what()}
    except HpcrlError as error:
        return {"error": type(error).__name__, "message": str(error)}


def _value(answer: dict[str, Any]) -> Json:
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer["value"]


def _timeout(patience: PatienceConfig) -> timedelta:
    """Return the timeout of collectives: longer than the agent's patience, which ends a hanging rank with all stacks in the log."""
    limits = (patience.load_seconds, patience.step_seconds, patience.save_seconds)
    return max(_LEAST, timedelta(seconds=max(limits)) + _LATER) if all(limits) else _NEVER


def _control(timeout: timedelta, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    return _new_group("gloo", timeout, ranks)


def _new_group(backend: str | None, timeout: timedelta, ranks: Sequence[int] | None) -> dist.ProcessGroup:
    """Make a group, of all ranks where `ranks` is None. All ranks call it, also those that are not in it."""
    return cast(dist.ProcessGroup, dist.new_group(ranks and list(ranks), timeout=timeout, backend=backend))


def _keep_freed_memory() -> None:
    """Let malloc keep blocks up to 32 MiB that are freed, up to 1 GiB in all.

    Returned to the system and allocated again, each tensor costs page faults: a third to a half of a small model's step on a CPU.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def joined(
    deterministic: bool = False, on_gpu: bool = False, patience: PatienceConfig | None = None
) -> Iterator[World]:
    """Join the ranks that torchrun started, and leave together; a single rank opens no port.

    Args:
        deterministic: only use deterministic kernels; torch raises RuntimeError where there is none.
        on_gpu: whether this rank requires a GPU; otherwise it uses one where torch sees one.
        patience: of the agent that watches these ranks; None: no agent does.

    Raises:
        DeviceError: this rank requires a GPU, and torch sees none.

    After an error the process groups are not destroyed: the other ranks are not there to meet, and the exit of this process wakes them.
    """
    if deterministic:
        # read when cuBLAS is first used
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG") or ":4096:8"
        torch.use_deterministic_algorithms(True)
    cuda = torch.cuda.is_available()
    if on_gpu and not cuda:
        raise DeviceError(
            f"this rank is to train on a GPU, and torch {torch.__version__} sees none "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); slurm.gpus_per_node=0 is a run on CPUs"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        _keep_freed_memory()
    timeout = _timeout(patience) if patience else _LEAST
    store = dist.HashStore() if os.environ["WORLD_SIZE"] == "1" else None  # pyright: ignore[reportPrivateImportUsage]
    alone = {"store": store, "rank": 0, "world_size": 1} if store else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, **alone)
    control = _control(timeout)
    yield World(dist.get_rank(), dist.get_world_size(), device, control, timeout=timeout)
    dist.barrier(control)
    dist.destroy_process_group()


def check_all_reduce(world: World) -> float:
    """Sum a tensor over all ranks, over the network that gradients take, and log how fast it was.

    All ranks call it; it also has NCCL make its connections, so that a network it cannot use fails here.

    Returns:
        The bus bandwidth in bytes per second as nccl-tests defines it: 2 (n - 1) / n times the tensor's bytes per second. It compares with
        the bandwidth of the links for any number n of ranks. 0 with one rank, which sends nothing.

    Raises:
        DeviceError: the sum is wrong.
    """
    on_gpu = world.device.type == "cuda"
    numbers = torch.empty(_NUMBERS_ON_GPU if on_gpu else _NUMBERS_ON_CPU, device=world.device)
    expected, seconds = world.size * (world.size + 1) / 2, 0.0
    for _ in range(1 + _ROUNDS):  # the first one connects
        numbers.fill_(world.rank + 1)
        _finish(world)
        began = time.perf_counter()
        dist.all_reduce(numbers)
        _finish(world)
        seconds = min(seconds or float("inf"), time.perf_counter() - began)
    if not bool((numbers == expected).all()):
        raise DeviceError(
            f"rank {world.rank} of {world.size}: an all-reduce over the trainer's ranks gave {numbers.min().item()} to {numbers.max().item()}, "
            f"expected {expected}. Leave out the node with slurm.extra.exclude, or check network settings such as NCCL_IB_HCA or NCCL_ALGO"
        )
    size = numbers.nbytes
    bandwidth = 2 * (world.size - 1) / world.size * size / seconds
    if world.first and world.size > 1:
        log.info(
            "all-reduce of %d MiB over %d ranks: %.2f ms, bus bandwidth %.2f GB/s (%s)",
            size >> 20, world.size, 1e3 * seconds, bandwidth / 1e9, "NCCL" if on_gpu else "gloo",
        )  # fmt: skip
    return bandwidth


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
