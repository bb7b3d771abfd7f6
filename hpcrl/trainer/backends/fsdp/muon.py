"""Muon: matrices move by the orthogonal factor of their momentum, everything else by Adam.

Source: Keller Jordan, Muon (https://kellerjordan.github.io/posts/muon/). Updates have the scale of AdamW's (arXiv:2502.16982), so that its
learning rate and weight decay fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from hpcrl.trainer.backends.fsdp.sharding import local

# a, b and c of x -> a x + b x³ + c x⁵, which moves singular values from (0, 1] to about 1; the first of the two sources has them
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS, _EPS = 5, 1e-7
_LAYERS = nn.ModuleList, nn.Sequential
_RMS = 0.2
"""Root mean square of an update by AdamW, as arXiv:2502.16982 measures it."""


def matrices_of(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that Muon moves: matrices and stacks of experts of the layers.

    Adam moves embeddings, convolutions, the head, single rows, and tables of scales and shifts. It also moves what comes before the layers
    and behind them, such as the projections to and from latents of a diffusion transformer. The first source has Muon for hidden layers
    only, and Adam for the first and the last one, gains and biases.
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
            lr, scale = group["lr"], _RMS * math.sqrt(max(parameter.shape[-2:]))
            local(parameter).mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)
        self._adam.step()

    def _with_momentum(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        # in place: another tensor of each gradient would take the memory that one moment less saves
        return gradient.lerp_(state["momentum_buffer"].lerp_(gradient, 1 - momentum), momentum)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the orthogonal factor U Vᵀ of matrices U S Vᵀ, by five iterations of Newton and Schulz in bfloat16.

    Args:
        matrix: [..., A, B].

    Returns:
        [..., A, B] in bfloat16, with singular values of about 0.7 to 1.2.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).bfloat16().reshape(-1, *sorted(matrix.shape[-2:]))
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).reshape(matrix.shape)


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
    size, rank = group.size(), group.rank()
    parts = [local(update).bfloat16() for update in updates]
    # of each matrix, how many numbers each rank has; the matrix of this rank, if there is one for it
    counts = [[math.prod(shape) for shape in _shapes(update, size)] for update in updates]
    mine = counts[rank] if rank < len(updates) else [0] * size
    theirs = [each[rank] for each in counts] + [0] * (size - len(updates))
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(mine))
    dist.all_to_all_single(received, sent, mine, theirs, group=group)
    if rank < len(updates):
        shapes, along = _shapes(updates[rank], size), _along(updates[rank])
        pieces = [piece.view(shape) for piece, shape in zip(received.split(mine), shapes, strict=True)]
        whole = orthogonal(torch.cat(pieces, along))
        split = whole.split([shape[along] for shape in shapes], along)
        received = torch.cat([piece.reshape(-1) for piece in split])
    dist.all_to_all_single(sent, received, theirs, mine, group=group)
    return [piece.view(part.shape) for piece, part in zip(sent.split(theirs[: len(parts)]), parts, strict=True)]


def _along(tensor: Any) -> int:
    return tensor.placements[_dimension_of_ranks(tensor)].dim


def _shapes(tensor: torch.Tensor, ranks: int) -> list[list[int]]:
    """Return the shape of each rank's part of a tensor: equally many rows, the last ones the rest."""
    along, shape = _along(tensor), list(local(tensor).shape)
    rows = tensor.shape[along]
    each = -(-rows // ranks)
    held = [max(0, min(each, rows - number * each)) for number in range(ranks)]
    return [[*shape[:along], count, *shape[along + 1 :]] for count in held]
