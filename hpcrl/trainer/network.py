"""Whether the trainer's ranks reach each other, and how fast, before anything is loaded."""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist

from hpcrl.errors import DeviceError
from hpcrl.trainer.distributed import World

_NUMBERS_ON_GPU, _NUMBERS_ON_CPU = 1 << 26, 1 << 18  # 256 MiB and 1 MiB of float32
_ROUNDS = 5

log = logging.getLogger(__name__)


def check_all_reduce(world: World) -> float:
    """Sum a tensor over all ranks, over the network that gradients take, and log how fast it was.

    All ranks call it; it also has NCCL make its connections, so that a network it cannot use fails here.

    Returns:
        The bus bandwidth in bytes per second as nccl-tests defines it, 2 (n - 1) / n times the tensor's bytes per second, which compares
        with the bandwidth of the links whatever the number n of ranks; 0 with one rank, which sends nothing.

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
            f"expected {expected}: leave out the node with slurm.extra.exclude, or look for a network setting such as NCCL_IB_HCA or NCCL_ALGO"
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
