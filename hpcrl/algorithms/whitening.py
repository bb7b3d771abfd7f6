"""Mean and variance over the trained tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

_LEAST_VARIANCE = 1e-8


def all_here(sums: torch.Tensor) -> torch.Tensor:
    """Return `sums`: the total over all ranks, where every sample is on this one."""
    return sums


def whiten(
    values_P: torch.Tensor, mask_P: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] = all_here
) -> torch.Tensor:
    """Return values with mean 0 and unbiased variance 1 over the mask on all ranks; the sources fail with fewer than two tokens."""
    count, mean, squares = _moments(values_P, mask_P, total)
    return (values_P - mean) / (squares / (count - 1).clamp(min=1) + _LEAST_VARIANCE).sqrt()


def normalize(
    advantages_P: torch.Tensor, mask_P: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] = all_here
) -> torch.Tensor:
    """Return advantages with mean 0 and variance 1 over the mask on all ranks, and 0 elsewhere.

    The variance is the mean square, at least 1e-8. SkyRL's mean also counts padding.
    """
    count, mean, squares = _moments(advantages_P, mask_P, total)
    normal_P = (advantages_P - mean) / (squares / count).clamp(min=_LEAST_VARIANCE).sqrt()
    return torch.where(mask_P > 0, normal_P, 0.0)


def _moments(
    values_P: torch.Tensor, mask_P: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how many tokens the mask has, at least 1, and the mean and the sum of squared differences from it."""
    count, summed = total(torch.stack([mask_P.sum(), (values_P * mask_P).sum()]))
    count = count.clamp(min=1)
    mean = summed / count
    (squares,) = total(((values_P - mean).square() * mask_P).sum()[None])
    return count, mean, squares
