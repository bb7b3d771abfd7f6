"""The trainer's side of the turns that it takes with engines on the same devices (trainer.placement.colocate_all)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

from hpcrl.errors import RunError
from hpcrl.trainer.distributed import World

Timer = Callable[[str], AbstractContextManager[None]]
"""Measures a phase by its name."""


@runtime_checkable
class LeavesDevice(Protocol):
    """A model in training that can leave its device, which every rank does. It trains on the device, and is saved and exported from either place."""

    def to_host(self) -> None:
        """Move what the device holds to host memory: weights, a reference, and, where offload_after_step says so, the optimizer's state."""
        ...

    def to_device(self) -> None:
        """Move it back."""
        ...


class DeviceTurns:
    """Lets engines have the devices while the trainer waits for samples; without engines there its methods do nothing.

    Args:
        engines: what is trained; None where something is not.
    """

    def __init__(self, engines: Iterable[Any], world: World, *, colocated: bool) -> None:
        self._engines = list[LeavesDevice]()
        self._world, self._device, self._away = world, world.device, False
        for engine in engines if colocated else ():
            if engine is not None:
                assert isinstance(engine, LeavesDevice), f"{type(engine).__name__} cannot leave its device"
                self._engines.append(engine)

    def end(self, timer: Timer) -> dict[str, float]:
        """Leave the devices of all ranks to engines, which may be told so when this returns; return metrics."""
        if not self._engines or self._away:
            return {}
        with timer("offload"):
            for engine in self._engines:
                engine.to_host()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._world.barrier()  # an engine may have the devices of several ranks, and rank 0 speaks for all
        self._away = True
        return self._used("trainer_away")

    def begin(self, timer: Timer) -> dict[str, float]:
        """Take the device again, all engines of which sleep; return metrics.

        Raises:
            RunError: it has too little room.
        """
        if not self._engines or not self._away:
            return {}
        used = self._used("engines_asleep")
        with timer("onload"):
            try:
                for engine in self._engines:
                    engine.to_device()
            except torch.OutOfMemoryError as error:
                (taken,) = used.values()
                raise RunError(
                    f"the trainer's state does not fit beside engines that sleep, with which {taken:.1f} GiB were in use: {error}; "
                    "use more GPUs, or set trainer.placement.colocate_all=false"
                ) from error
        self._away = False
        return used

    def _used(self, when: str) -> dict[str, float]:
        """Return how much of the device all processes together use; nothing on a CPU."""
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        return {f"memory/{when}_gib": (total - free) / 2**30}
