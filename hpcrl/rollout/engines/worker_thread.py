"""An engine in the worker's own process whose one thread computes: what those that are no language models have in common."""

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


class OwnThreadEngine(InProcessEngine):
    """The engine: samples, and new weights in between.

    Args:
        replica: name in errors.
        home: where it computes.
    """

    def __init__(self, version: int, replica: str, home: torch.device) -> None:
        super().__init__(replica)
        self.version, self._home = version, home
        self._thread = ThreadPoolExecutor(1, "engine")

    @abstractmethod
    def _take(self, tensors: dict[str, torch.Tensor], weights: PublishedWeights) -> None:
        """Have the tensors of a published version, in the thread."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Move what others replace to a device, in the thread."""

    @abstractmethod
    def _probed(self, token_ids: Sequence[int]) -> list[float]:
        """Return what the trainer's probe is compared with, in the thread."""

    async def _computed(self, function: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._thread.submit(function))

    async def ended(self) -> dict[str, dict[int, Generation]]:
        return {}  # samples of a call are made together

    async def update_weights(self, weights: PublishedWeights) -> dict[str, float]:
        tensors, proof = await self._computed(lambda: read_tensors(weights))
        check_ranks([proof], weights, self._who)

        def take() -> dict[str, float]:
            started = time.monotonic()
            self._move(self._home)
            self._take(tensors, weights)
            self.version = weights.version
            seconds = time.monotonic() - started
            return {"weights/pause_seconds": seconds, "weights/load_seconds": seconds}

        with self._asked(UPDATE):
            return await self._computed(take)

    async def sleep(self) -> None:
        def rest() -> None:
            self._move(torch.device("cpu"))
            if self._home.type == "cuda":
                torch.cuda.empty_cache()

        with self._asked(SLEEP):
            await self._computed(rest)

    async def probe(self, weights: PublishedWeights, dtype: str, allowed: float | None) -> float | None:
        probe = weights.probe
        if probe is None:
            return None
        with self._asked("probe"):
            found = difference(probe.logprobs, await self._computed(lambda: self._probed(probe.token_ids)))
        check_probe(found, tolerance(probe, dtype, allowed), weights.version, self._who)
        return found

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
    """Give a network other weights. Raises EngineError where they are not those of this network.

    Args:
        own_name: what the network calls a tensor of a file.
    """
    own = network.state_dict(keep_vars=True)
    named = {own_name(name): tensor for name, tensor in tensors.items()}
    if wrong := sorted(map(str, own.keys() ^ named.keys())):
        raise EngineError(f"{weights.path} has other weights than the network, by {', '.join(wrong[:8])}")
    for name, tensor in named.items():
        own[str(name)].copy_(tensor)
