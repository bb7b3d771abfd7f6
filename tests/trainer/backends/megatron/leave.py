"""Leaving Megatron-core's groups of ranks, which it forgets but does not close: the threads of dozens of them keep a processor busy."""

from __future__ import annotations

import gc

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from hpcrl.trainer import rng
from hpcrl.trainer.distributed import World


def leave_groups(world: World) -> None:
    """Close all groups but the two of `world`, and draw from torch's generators alone. All ranks call it, when nothing that uses the groups is left."""
    parallel_state.destroy_model_parallel()
    rng._OTHERS.clear()
    # hooks of parameters keep the wrappers alive, and those keep groups, whose threads end with the last reference only
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):  # a weak proxy of what is gone has a type too
            vars(found).clear()
    gc.collect()
    world.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group is not world.control:
            dist.destroy_process_group(group)
    world.barrier()


def leave(world: World, _options: dict[str, object]) -> None:
    """A scenario: what comes next may share a model in another way."""
    if parallel_state.model_parallel_is_initialized():
        leave_groups(world)
