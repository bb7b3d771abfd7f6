"""Muon's step for a Megatron-core model, of the matrices of transformers' model as with FSDP2.

Megatron-core's distributed optimizer cuts parameters into stretches, tensor parallelism cuts matrices, and some parameters are several
matrices. The layout of checkpoints has the rectangles of those matrices that lie in a stretch, and these are what ranks exchange.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcrl.trainer.backends.megatron.process_groups import stage_group
from hpcrl.trainer.backends.megatron.shard_layout import ShardRectangle
from hpcrl.trainer.backends.orthogonal import SharedMatrix, orthogonal_among, scale, with_momentum
from hpcrl.trainer.distributed import World

MOMENTUM = "momentum_buffer"
"""Name of the momentum in the state of an optimizer, and in checkpoints."""

_IN_LAYERS = re.compile(r"(^|\.)layers\.\d+\.")
_Matrix = tuple[str, int]
"""A matrix of transformers' model: name of the tensor, and the expert, or 0."""

_Step = tuple[torch.Tensor, torch.Tensor, float]
"""The step of a part: what is orthogonalized and the weights, both [rows, columns] and views, and the factor of what is added."""


@dataclass(frozen=True)
class _Part:
    """A rectangle of a matrix on this rank.

    Attributes:
        shape: [A, B] of the matrix.
        place: its rows and its columns in the matrix: where they begin, and their number.
        values: [rows, columns], a view.
    """

    matrix: _Matrix
    shape: tuple[int, int]
    place: tuple[tuple[int, int], tuple[int, int]]
    values: torch.Tensor


@dataclass(frozen=True)
class _Moved:
    """A stretch of a parameter that this rank steps.

    Attributes:
        main: its numbers [n], which the optimizer steps.
        group: the optimizer's settings of it.
        momentum: [n].
        first: where the stretch begins in the flattened parameter.
    """

    main: torch.Tensor
    group: dict[str, Any]
    momentum: torch.Tensor
    first: int
    rectangles: Sequence[ShardRectangle]

    def parts(self, values: torch.Tensor) -> Iterator[_Part]:
        """Yield the rectangles of matrices in numbers of the stretch, [n]."""
        for rectangle in self.rectangles:
            rows, columns = rectangle.shape[-2:]
            for shard in rectangle.shards(values, self.first):
                *expert, top, left = shard.offsets
                part = shard.values.view(shard.values.shape[-2:])
                place = (top, part.shape[0]), (left, part.shape[1])
                yield _Part((rectangle.name, expert[0] if expert else 0), (rows, columns), place, part)


def moved_by_muon(rectangles: Sequence[ShardRectangle]) -> bool:
    """Return whether Muon moves a parameter, as with FSDP2: its tensors are matrices, or stacks of experts, inside layers."""
    tensors = {(each.name, each.shape) for each in rectangles}
    return all(_IN_LAYERS.search(name) and len(shape) > 1 and min(shape[-2:]) > 1 for name, shape in tensors)


class MegatronMuon:
    """Muon's step of the matrices of layers, beside Megatron-core's distributed optimizer, whose Adam steps the other parameters.

    Ranks of a pipeline stage gather one matrix each, the largest first. A matrix that each of its ranks has whole is not sent.

    Args:
        optimizer: Megatron-core's, of distributed optimizers. Its state has the momentum, and Adam finds no gradient of what Muon moves.
        layout: of the trained parameters.
        momentum: decay rate of the sum of gradients, per optimizer step.
        world: all ranks, which construct it together.
    """

    def __init__(
        self, optimizer: Any, layout: Mapping[nn.Parameter, Sequence[ShardRectangle]], momentum: float, world: World
    ) -> None:
        self._momentum, self._device, self._group = momentum, world.device, stage_group()
        self._moved = list(_moved(optimizer, layout))
        parts = [part for each in self._moved for part in each.parts(each.momentum)]
        every: list[Any] = world.all_gather(lambda: [[*part.matrix, part.shape, part.place] for part in parts])
        of_rank = dict(zip(dist.get_process_group_ranks(world.control), every, strict=True))
        shared = _shared([of_rank[rank] for rank in dist.get_process_group_ranks(self._group)])
        whole = {name for name, each in shared.items() if all(count in (0, each.size) for count in each.counts())}
        own = _shared([of_rank[dist.get_rank()]])
        self._own = {name: each for name, each in own.items() if name in whole}
        sent, ranks = sorted(shared.keys() - whole, key=lambda name: (-shared[name].size, name)), self._group.size()
        turns = [sent[first : first + ranks] for first in range(0, len(sent), ranks)]
        self._turns = [{name: shared[name] for name in turn} for turn in turns]

    @torch.no_grad()
    def step(self) -> None:
        """Step the matrices with the learning rates of their groups. All ranks call it, with gradients on each."""
        steps = defaultdict[_Matrix, list[_Step]](list)
        for each in self._moved:
            gradient, lr = each.main.grad, each.group["lr"]
            assert gradient is not None
            update = with_momentum(gradient, each.momentum, self._momentum)
            each.main.mul_(1 - lr * each.group["weight_decay"])
            for part, moved in zip(each.parts(update), each.parts(each.main), strict=True):
                steps[part.matrix].append((part.values, moved.values, -lr * scale(part.shape)))
            each.main.grad = None
        for name, matrix in self._own.items():
            _add(matrix.orthogonal(self._numbers(steps[name])), steps[name])
        for turn in self._turns:
            own = [step for name in turn for step in steps[name]]
            _add(orthogonal_among(self._numbers(own), list(turn.values()), self._group), own)

    def _numbers(self, steps: Sequence[_Step]) -> torch.Tensor:
        """Return the updates of parts, flat, in bfloat16."""
        none = torch.empty(0, dtype=torch.bfloat16, device=self._device)
        return torch.cat([none, *(update.bfloat16().reshape(-1) for update, _, _ in steps)])


def _moved(optimizer: Any, layout: Mapping[nn.Parameter, Sequence[ShardRectangle]]) -> Iterator[_Moved]:
    """Yield this rank's stretches of matrices of layers, whose momentum begins at 0."""
    for each in optimizer.chained_optimizers:
        if each.optimizer is None:  # on a stage of which nothing is trained
            continue
        for parameter, (number, place) in each.model_param_group_index_map.items():
            if moved_by_muon(layout[parameter]):
                group = each.optimizer.param_groups[number]
                main = group["params"][place]
                momentum = torch.zeros_like(main)
                each.optimizer.state[main][MOMENTUM] = momentum
                first = each._get_model_param_range_map(parameter)["param"].start
                yield _Moved(main, group, momentum, first, layout[parameter])


def _shared(ranks: Sequence[Sequence[Any]]) -> dict[_Matrix, SharedMatrix]:
    """Return the matrices of which some rank has parts.

    Args:
        ranks: the parts of each: name, expert, shape of the matrix, place.
    """
    found = dict[_Matrix, SharedMatrix]()
    for rank, parts in enumerate(ranks):
        for name, expert, shape, place in parts:
            matrix = found.setdefault((name, expert), SharedMatrix(shape, [[] for _ in ranks]))
            matrix.places[rank].append(place)
    return found


def _add(factors: torch.Tensor, steps: Sequence[_Step]) -> None:
    """Add orthogonal factors, flat, to the weights of parts."""
    parts = factors.split([update.numel() for update, _, _ in steps])
    for part, (_, weights, factor) in zip(parts, steps, strict=True):
        weights.add_(part.view(weights.shape), alpha=factor)
