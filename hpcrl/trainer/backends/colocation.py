"""Trainer's side of sharing devices with engines: it offloads its state while they generate (trainer.placement.colocate_all, lend)."""

from __future__ import annotations

import time
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
    """A model in training whose state moves between device and host memory, on every rank; it is saved and exported from either."""

    def to_host(self) -> None:
        """Move weights, reference and, with offload_after_step, the optimizer's state to host memory."""
        ...

    def to_device(self) -> None:
        """Move the state back to the device."""
        ...


class DeviceLease:
    """Releases the devices to rollout engines while the trainer waits for samples; does nothing where none has them.

    Args:
        engines: trained models; None entries are left out.
        colocated: whether engines have the devices at each wait.
        lends: whether they have them at waits at which the controller asks for it.

    Attributes:
        away: whether the state is offloaded.
        onload_seconds: of the last time that it was loaded to the device; 0: it never was.
    """

    def __init__(self, engines: Iterable[Any], world: World, *, colocated: bool, lends: bool = False) -> None:
        self._engines = list[LeavesDevice]()
        self._world, self._device, self._turns = world, world.device, colocated
        self.away, self.onload_seconds = False, 0.0
        self._lent = dict[str, float]()
        for engine in engines if colocated or lends else ():
            if engine is not None:
                assert isinstance(engine, LeavesDevice), f"{type(engine).__name__} cannot leave its device"
                self._engines.append(engine)

    def release(self, timer: Timer) -> dict[str, float]:
        """Offload the state of all ranks where engines are colocated; they may wake when this returns. Returns metrics."""
        return self._leave(timer) if self._turns else {}

    def lend(self, timer: Timer) -> None:
        """Offload the state of all ranks; lent engines may wake when this returns. `acquire` returns the metrics."""
        self._lent = self._leave(timer)

    def _leave(self, timer: Timer) -> dict[str, float]:
        if not self._engines or self.away:
            return {}
        with timer("offload"):
            for engine in self._engines:
                engine.to_host()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._world.barrier()  # an engine may span the devices of several ranks, and rank 0 wakes it
        self.away = True
        return self._used("trainer_away")

    def acquire(self, timer: Timer) -> dict[str, float]:
        """Load the state to the device, whose rollout engines all sleep; return metrics.

        Raises:
            RunError: the state does not fit beside the sleeping engines.
        """
        if not self._engines or not self.away:
            return {}
        used, began = self._lent | self._used("engines_asleep"), time.monotonic()
        with timer("onload"):
            try:
                for engine in self._engines:
                    engine.to_device()
            except torch.OutOfMemoryError as error:
                taken = used["memory/engines_asleep_gib"]
                raise RunError(
                    f"the trainer's state does not fit beside engines that sleep, with which {taken:.1f} GiB were in use: {error}; "
                    f"use more GPUs, or set trainer.placement.{'colocate_all' if self._turns else 'lend'}=false"
                ) from error
        self.away, self.onload_seconds, self._lent = False, time.monotonic() - began, {}
        return used

    def _used(self, when: str) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        return {f"memory/{when}_gib": (total - free) / 2**30}
