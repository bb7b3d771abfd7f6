"""Process groups of ranks that share a model: tensor, context, expert, data and pipeline parallel, in Megatron-core's order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.trainer.distributed import World
from hpcrl.trainer.rng import draws_from

_MINUTE = timedelta(minutes=1)


def join_groups(sizes: MegatronModelConfig, virtual: int | None, world: World, seed: int) -> World:
    """Join this rank's groups, once in a process; return the ranks that train other samples than this one.

    Args:
        virtual: parts of each pipeline stage, with an interleaved schedule.
        seed: of what is drawn at random in layers.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual,
            context_parallel_size=sizes.context_parallel_size,
            expert_model_parallel_size=sizes.expert_model_parallel_size,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
            distributed_timeout_minutes=int(world.timeout / _MINUTE),
        )
        before = torch.get_rng_state()
        model_parallel_cuda_manual_seed(seed)
        torch.set_rng_state(before)
        _follow_tracker()
    places = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return replace(
        world,
        rank=parallel_state.get_data_parallel_rank(),
        size=parallel_state.get_data_parallel_world_size(),
        control=_group(parallel_state.get_data_parallel_group_gloo()),
        is_leader=not any(places),
    )


def _follow_tracker() -> None:
    """Save Megatron-core's random generators with this rank's random state; another layout draws new numbers."""
    places = {
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(with_context_parallel=True),
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
    }
    place = ".".join(f"{name}{rank}" for name, rank in places.items())
    for name in _tracker().get_states():
        draws_from(f"{place}.{name}", _Tracked(name))


@dataclass(frozen=True)
class _Tracked:
    """One of the generators of Megatron-core's tracker."""

    name: str

    def get_state(self) -> torch.Tensor:
        return _tracker().get_states()[self.name]

    def set_state(self, state: torch.Tensor) -> None:
        states = _tracker().get_states()
        _tracker().set_states(states | {self.name: state})


def _tracker() -> Any:
    return get_cuda_rng_tracker()


def tensor_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_tensor_model_parallel_group())


def context_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_context_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_pipeline_model_parallel_group())


def stage_group() -> dist.ProcessGroup:
    """Return the ranks that share the layers of a pipeline stage and its optimizer, those with the same samples and others."""
    return _group(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))


def expert_tensor_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_expert_tensor_parallel_group())


def experts_group() -> dist.ProcessGroup:
    """Return the ranks that share the experts, and the matrices of each."""
    return _group(parallel_state.get_expert_tensor_and_model_parallel_group())


def _group(found: object) -> dist.ProcessGroup:
    assert isinstance(found, dist.ProcessGroup)
    return found
