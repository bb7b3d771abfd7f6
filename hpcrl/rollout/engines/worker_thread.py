"""Base of engines that compute in one thread of the worker's process: diffusion models and action experts."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.engines.in_process import SLEEP, UPDATE, InProcessEngine
from hpcrl.rollout.engines.tensors import read_tensors
from hpcrl.rollout.engines.weight_check import check_probe, check_ranks, difference, tolerance
from hpcrl.rollout.limiter import Load

R = TypeVar("R")


class WorkerThreadEngine(InProcessEngine):
    """An engine whose calls, weight updates included, run one after the other in one thread.

    Args:
        replica: name in errors.
        device: of the weights while the engine is awake.
    """

    def __init__(self, version: int, replica: str, device: torch.device) -> None:
        super().__init__(replica)
        self.version, self._device = version, device
        self._thread = ThreadPoolExecutor(1, "engine")

    @abstractmethod
    def _load(self, tensors: dict[str, torch.Tensor], weights: PublishedWeights) -> None:
        """Load the tensors of a published version, in the thread."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Move the weights to a device, in the thread."""

    @abstractmethod
    def _probed(self, token_ids: Sequence[int]) -> list[float]:
        """Return the engine's values that are compared with the trainer's probe, in the thread."""

    async def _computed(self, function: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._thread.submit(function))

    async def ended(self) -> dict[str, dict[int, Generation]]:
        return {}  # samples of a call are made together

    async def update_weights(self, weights: PublishedWeights) -> dict[str, float]:
        tensors, proof = await self._computed(lambda: read_tensors(weights))
        check_ranks([proof], weights, self._who)

        def load() -> dict[str, float]:
            started = time.monotonic()
            self._move(self._device)
            self._load(tensors, weights)
            self.version = weights.version
            seconds = time.monotonic() - started
            return {"weights/pause_seconds": seconds, "weights/load_seconds": seconds}

        with self._asked(UPDATE):
            metrics = await self._computed(load)
        self._awake.set()
        return metrics

    async def sleep(self) -> None:
        def rest() -> None:
            self._move(torch.device("cpu"))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        self._awake.clear()
        with self._asked(SLEEP):
            await self._computed(rest)

    async def probe(self, weights: PublishedWeights, dtype: str, allowed: float | None) -> float | None:
        probe = weights.probe
        if probe is None:
            return None
        with self._asked("probe"):
            mean = difference(probe.logprobs, await self._computed(lambda: self._probed(probe.token_ids)))
        check_probe(mean, tolerance(probe, dtype, allowed), weights.version, self._who)
        return mean

    async def load(self) -> Load | None:
        return Load(0.0, 0.0, 0.0)

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@torch.inference_mode()
def replace_whole(
    network: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    weights: PublishedWeights,
    own_name: Callable[[str], str | None] = lambda name: name,
) -> None:
    """Replace all weights of a network. Raises EngineError where names differ from the network's.

    Args:
        own_name: the network's name of a tensor of a file.
    """
    own = network.state_dict(keep_vars=True)
    named = {own_name(name): tensor for name, tensor in tensors.items()}
    if wrong := sorted(map(str, own.keys() ^ named.keys())):
        raise EngineError(f"{weights.path} has other weights than the network, by {', '.join(wrong[:8])}")
    for name, tensor in named.items():
        own[str(name)].copy_(tensor)
