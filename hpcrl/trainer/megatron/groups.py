"""The groups of ranks that share a model: tensor, context, expert, data and pipeline parallel, in Megatron-core's order."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from hpcrl.config.megatron import MegatronModelConfig
from hpcrl.trainer.world import PATIENCE, World

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
            distributed_timeout_minutes=int(PATIENCE / _MINUTE),
        )
        before = torch.get_rng_state()
        model_parallel_cuda_manual_seed(seed)
        torch.set_rng_state(before)
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
        leads=not any(places),
    )


def tensor_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_tensor_model_parallel_group())


def context_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_context_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_pipeline_model_parallel_group())


def _group(found: object) -> dist.ProcessGroup:
    assert isinstance(found, dist.ProcessGroup)
    return found
