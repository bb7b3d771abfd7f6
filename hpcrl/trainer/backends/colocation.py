"""Trainer's side of sharing devices with engines: it offloads its state while they generate (trainer.placement.colocate_all)."""

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
    """A model in training whose state moves between device and host memory, on every rank; it is saved and exported from either."""

    def to_host(self) -> None:
        """Move weights, reference and, with offload_after_step, the optimizer's state to host memory."""
        ...

    def to_device(self) -> None:
        """Move the state back to the device."""
        ...


class DeviceLease:
    """Releases the devices to rollout engines while the trainer waits for samples; does nothing where none is colocated.

    Args:
        engines: trained models; None entries are left out.
    """

    def __init__(self, engines: Iterable[Any], world: World, *, colocated: bool) -> None:
        self._engines = list[LeavesDevice]()
        self._world, self._device, self._away = world, world.device, False
        for engine in engines if colocated else ():
            if engine is not None:
                assert isinstance(engine, LeavesDevice), f"{type(engine).__name__} cannot leave its device"
                self._engines.append(engine)

    def release(self, timer: Timer) -> dict[str, float]:
        """Offload the state of all ranks; rollout engines may wake when this returns. Returns metrics."""
        if not self._engines or self._away:
            return {}
        with timer("offload"):
            for engine in self._engines:
                engine.to_host()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._world.barrier()  # an engine may span the devices of several ranks, and rank 0 wakes it
        self._away = True
        return self._used("trainer_away")

    def acquire(self, timer: Timer) -> dict[str, float]:
        """Load the state to the device, whose rollout engines all sleep; return metrics.

        Raises:
            RunError: the state does not fit beside the sleeping engines.
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
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        return {f"memory/{when}_gib": (total - free) / 2**30}
