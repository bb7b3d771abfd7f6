"""The arithmetic of Muon's step: momentum, orthogonal factors, and matrices that several ranks share.

Source: Keller Jordan, Muon (https://kellerjordan.github.io/posts/muon/). Updates have the scale of AdamW's (arXiv:2502.16982), so that its
learning rate and weight decay fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# a, b and c of x -> a x + b x³ + c x⁵, which moves singular values from (0, 1] to about 1; the first of the two sources has them
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS, _EPS = 5, 1e-7
_RMS = 0.2
"""Root mean square of an update by AdamW, as arXiv:2502.16982 measures it."""

Place = Sequence[Sequence[int]]
"""A part of a matrix or stack: where it begins in each dimension, and its length there."""


def with_momentum(gradient: torch.Tensor, buffer: torch.Tensor, momentum: float) -> torch.Tensor:
    """Add a gradient to its momentum; return the gradient's tensor with what is orthogonalized: by Nesterov, a step ahead."""
    # in place: another tensor of each gradient would take the memory that one moment less saves
    return gradient.lerp_(buffer.lerp_(gradient, 1 - momentum), momentum)


def scale(shape: Sequence[int]) -> float:
    """Return the factor of the orthogonal factor of [..., A, B] that gives it the scale of AdamW's updates."""
    return _RMS * math.sqrt(max(shape[-2:]))


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


@dataclass(frozen=True)
class SharedMatrix:
    """A matrix of which ranks have parts, which together are all of it; several ranks may have the same.

    Attributes:
        shape: [A, B], or [E, A, B] of a stack.
        places: of the parts of each rank.
    """

    shape: Sequence[int]
    places: Sequence[list[Place]]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def counts(self) -> list[int]:
        """Return the numbers of each rank's parts."""
        return [sum(map(_count, places)) for places in self.places]

    def orthogonal(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the orthogonal factor of a matrix, part by part.

        Args:
            numbers: [n] of all parts, rank by rank.

        Returns:
            [n], in the same order.
        """
        places = [place for of_rank in self.places for place in of_rank]
        whole = numbers.new_empty(tuple(self.shape))
        for place, part in zip(places, numbers.split([_count(place) for place in places]), strict=True):
            _part(whole, place).copy_(part.view([length for _, length in place]))
        factor = orthogonal(whole)
        return torch.cat([_part(factor, place).reshape(-1) for place in places])


def orthogonal_among(numbers: torch.Tensor, matrices: Sequence[SharedMatrix], group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's parts of the orthogonal factors of at most as many matrices as there are ranks. All ranks of the group call it.

    Each rank gathers one matrix, the first rank the first one, and sends back to each rank its parts.

    Args:
        numbers: [n] in bfloat16, of this rank's parts, matrix by matrix. It is overwritten.

    Returns:
        [n], in the same order: the same tensor.
    """
    rank, counts = group.rank(), [each.counts() for each in matrices]
    gathers = rank < len(matrices)
    # the numbers that each rank has of the matrix of this one, and that this one has of the matrix of each
    mine = counts[rank] if gathers else [0] * group.size()
    theirs = [each[rank] for each in counts] + [0] * (group.size() - len(matrices))
    gathered = numbers.new_empty(sum(mine))
    dist.all_to_all_single(gathered, numbers, mine, theirs, group=group)
    if gathers:
        gathered = matrices[rank].orthogonal(gathered)
    dist.all_to_all_single(numbers, gathered, theirs, mine, group=group)
    return numbers


def _count(place: Place) -> int:
    return math.prod(length for _, length in place)


def _part(matrix: torch.Tensor, place: Place) -> torch.Tensor:
    for dimension, (begin, length) in enumerate(place):
        matrix = matrix.narrow(dimension, begin, length)
    return matrix
