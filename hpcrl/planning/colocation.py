"""Estimates whether trainer and engine fit on devices that they share in turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.config import Config
from hpcrl.planning.estimate import Estimate
from hpcrl.planning.rank_groups import communicators

_CONTEXT, _GRAPHS, _COMMUNICATOR = 1 << 30, 1 << 30, 1 << 29
"""Bytes of a device that a CUDA context with its libraries takes, that the graphs of an engine take, and that NCCL takes for a group of ranks.
Estimates, not measured."""
_CUSTOM = 1 << 29
"""Bytes of vLLM's own all-reduce of a tensor parallel group. An estimate, not measured."""


@dataclass(frozen=True)
class LeasedMemory:
    """Memory of a device while trainer or engine holds its lease.

    Attributes:
        holder: "trainer" or "engine".
        trainer, engine: bytes of the device that they take.
    """

    holder: str
    trainer: int
    engine: int


def leased_memory(config: Config, found: Estimate, device: float) -> Iterator[LeasedMemory]:
    """Yield the memory of a device for either holder of its lease.

    Args:
        device: its bytes.
    """
    yield LeasedMemory("trainer", found.total, _asleep(config))
    share = config.engine_memory_share(shared=True)
    yield LeasedMemory("engine", _away(config) + _kept(config, found), round(share * device))


def _asleep(config: Config) -> int:
    engine = config.generator.inference_engine
    tensor, others = engine.tensor_parallel_size, (engine.pipeline_parallel_size, engine.data_parallel_size)
    groups = sum(size > 1 for size in (tensor, *others))
    graphs = 0 if engine.runs_eagerly(on_cpu=False) else _GRAPHS
    # with a group of all ranks, which vLLM makes too
    return _CONTEXT + graphs + (groups + (groups > 0)) * _COMMUNICATOR + (_CUSTOM if tensor > 1 else 0)


def _away(config: Config) -> int:
    return _CONTEXT + communicators(config.trainer) * _COMMUNICATOR


def on_host(config: Config, found: Estimate) -> int:
    """Return the bytes of host memory that a rank's state takes while an engine has its device; they stay allocated. Gradients are dropped."""
    return sum(need.weights + need.optimizer for need in found.needs.values()) - _kept(config, found)


def _kept(config: Config, found: Estimate) -> int:
    sections = {"policy": config.trainer.policy, "critic": config.trainer.critic}
    return sum(
        found.needs[role].optimizer
        for role, section in sections.items()
        if role in found.needs and not section.optimizer_config.offload_after_step
    )
