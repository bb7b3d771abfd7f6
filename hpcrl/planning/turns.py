"""Whether trainer and engine fit on the devices on which they take turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.config import Config
from hpcrl.planning.estimate import Estimate

ASLEEP = 2 << 30
"""Bytes that an engine keeps of a device while it sleeps: context, CUDA graphs, communicators. An estimate."""
AWAY = 1 << 30
"""Bytes that a trainer rank keeps of a device while an engine has it: context and communicators. An estimate."""


@dataclass(frozen=True)
class Turn:
    """One of the two turns.

    Attributes:
        trainer, engine: bytes that they have of the device.
    """

    whose: str
    trainer: int
    engine: int


def turns(config: Config, found: Estimate, device: float) -> Iterator[Turn]:
    """Yield both turns.

    Args:
        device: its bytes.
    """
    yield Turn("trainer", found.total, ASLEEP)
    share = config.generator.inference_engine.gpu_memory_utilization
    yield Turn("engine", AWAY + _kept(config, found), round(share * device))


def on_host(config: Config, found: Estimate) -> int:
    """Return the bytes of host memory that a rank's state takes while an engine has its device; they stay allocated."""
    return sum(need.resident for need in found.needs.values()) - _kept(config, found)


def _kept(config: Config, found: Estimate) -> int:
    """Return the bytes of optimizers that stay where they are."""
    sections = {"policy": config.trainer.policy, "critic": config.trainer.critic}
    return sum(
        found.needs[role].optimizer
        for role, section in sections.items()
        if role in found.needs and not section.optimizer_config.offload_after_step
    )
