"""Scenarios of ranks for the tests of Muon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpcrl.trainer.backends.fsdp.muon import _orthogonal
from hpcrl.trainer.distributed import World

SHAPES = [(5, 7), (8, 4), (1, 6), (2, 3, 5), (6, 6)]


def matrices() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def sharded(world: World, options: dict[str, Any]) -> None:
    """Write the orthogonal factors of matrices that the ranks share, uneven ones and stacks too."""
    mesh = init_device_mesh("cpu", (world.size,))
    written(world, options, [distribute_tensor(each, mesh, [Shard(each.ndim - 2)]) for each in matrices()])


def experts(world: World, options: dict[str, Any]) -> None:
    """Write the orthogonal factors of a stack whose experts the ranks share, and would shard within each as FSDP2 does."""
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("shards", "experts"))
    written(world, options, [distribute_tensor(stack(), mesh, [Shard(1), Shard(0)])])


def stack() -> torch.Tensor:
    return torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(4))


def written(world: World, options: dict[str, Any], updates: list[torch.Tensor]) -> None:
    parts = dict(_orthogonal(updates))
    every = world.all_gather(lambda: [parts[place].float().tolist() for place in range(len(updates))])
    if world.first:
        Path(options["out"]).write_text(json.dumps(every))
