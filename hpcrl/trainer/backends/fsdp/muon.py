"""Muon: matrices move by the orthogonal factor of their momentum, everything else by Adam."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from hpcrl.trainer.backends.fsdp.sharding import local
from hpcrl.trainer.backends.orthogonal import Place, SharedMatrix, orthogonal, orthogonal_among, scale, with_momentum

_LAYERS = nn.ModuleList, nn.Sequential


def matrices_of(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that Muon moves: matrices and stacks of experts of the layers.

    Adam moves embeddings, convolutions, the head, single rows, and tables of scales and shifts. It also moves what comes before the layers
    and behind them, such as the projections to and from latents of a diffusion transformer. Muon's author has it for hidden layers only,
    and Adam for the first and the last one, gains and biases.
    """
    inner = {id(each) for module in model.modules() if isinstance(module, _LAYERS) for each in module.parameters()}
    inner -= {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding | _ConvNd)}
    for module in model.modules():
        head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
        inner -= {id(each) for each in head.parameters()} if isinstance(head, nn.Module) else set()
    return {
        each
        for name, each in model.named_parameters()
        if each.ndim in (2, 3) and min(each.shape[-2:]) > 1 and id(each) in inner and not name.endswith("_table")
    }


class Muon(torch.optim.Optimizer):
    """Muon for matrices and Adam for other parameters, in one optimizer.

    Args:
        matrices: groups of [A, B], or [E, A, B] of E experts, with weight decays; they may be sharded.
        adam: of the other parameters.
        momentum: decay rate of the sum of gradients, per optimizer step.
    """

    def __init__(self, matrices: list[dict[str, Any]], adam: torch.optim.Adam, momentum: float) -> None:
        super().__init__(matrices, {"lr": adam.defaults["lr"], "momentum": momentum})
        self._matrices, self._adam = len(matrices), adam
        self.state = adam.state
        self.param_groups += adam.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = self.param_groups[: self._matrices]
        moved = [(each, group) for group in groups for each in group["params"] if each.grad is not None]
        updates = [self._with_momentum(each, group["momentum"]) for each, group in moved]
        for place, update in _orthogonal(updates):
            parameter, group = moved[place]
            lr = group["lr"]
            local(parameter).mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale(parameter.shape))
        self._adam.step()

    def _with_momentum(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        return with_momentum(gradient, state["momentum_buffer"], momentum)


def _orthogonal(updates: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the place of each update and this rank's part of its orthogonal factor.

    Ranks that share matrices take one each, the largest first: each computes those that it has taken, whole, and sends their parts back.
    Whole experts stay where they are: a stack of them may be larger than the memory of one rank.
    """
    shared = defaultdict[dist.ProcessGroup | None, list[int]](list)
    for place, update in enumerate(updates):
        shared[_group_of(update)].append(place)
    for group, places in shared.items():
        if group is None:
            yield from ((place, orthogonal(local(updates[place]))) for place in places)
            continue
        places.sort(key=lambda place: -updates[place].numel())
        for first in range(0, len(places), group.size()):
            taken = places[first : first + group.size()]
            parts = _divided([updates[place] for place in taken], group)
            yield from zip(taken, parts, strict=True)


def _group_of(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that share the matrices of a tensor; None: this one has its matrices whole, though others may have more experts."""
    dimension = _dimension_of_ranks(tensor)
    return tensor.device_mesh.get_group(dimension) if isinstance(tensor, DTensor) and dimension is not None else None


def _dimension_of_ranks(tensor: Any) -> int | None:
    """Return the dimension of a tensor's mesh whose ranks share its matrices."""
    if not isinstance(tensor, DTensor):
        return None
    for number, each in enumerate(tensor.placements):
        if isinstance(each, Shard) and each.dim >= tensor.ndim - 2 and tensor.device_mesh.size(number) > 1:
            return number
    return None


def _divided(updates: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return this rank's part of the orthogonal factor of each of at most as many matrices as there are ranks."""
    parts = [local(update).bfloat16() for update in updates]
    sent = torch.cat([part.reshape(-1) for part in parts])
    found = orthogonal_among(sent, [_shared(update, group.size()) for update in updates], group)
    counts = [part.numel() for part in parts]
    return [piece.view(part.shape) for piece, part in zip(found.split(counts), parts, strict=True)]


def _shared(tensor: Any, ranks: int) -> SharedMatrix:
    """Return a tensor with each rank's part of it: equally many rows, the last ones the rest."""
    dimension = _dimension_of_ranks(tensor)
    assert dimension is not None
    along, shape = tensor.placements[dimension].dim, list(local(tensor).shape)
    shape[along] = rows = tensor.shape[along]
    each = -(-rows // ranks)
    begins = [min(rows, number * each) for number in range(ranks + 1)]
    places = list[list[Place]]()
    for begin, end in pairwise(begins):
        place = [(0, length) for length in shape]
        place[along] = begin, end - begin
        places.append([place])
    return SharedMatrix(shape, places)
