"""Which tokens of a mini-batch have the highest entropies, whichever ranks they are on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

_ABOVE_ALL = 0x7F800001  # as an integer, the bits of a float32 that is not negative grow with it; these come after those of infinity


def highest_entropies(
    entropies_P: torch.Tensor, mask_P: torch.Tensor, share: float, over_ranks: Callable[[Sequence[float]], list[float]]
) -> torch.Tensor:
    """Return [P] float32, 1 for the tokens of highest entropy among the masked ones of all ranks (arXiv:2506.01939, equation 5).

    Of N masked tokens, floor(share (N - 1)) + 1 have the threshold or more; all of the threshold's own entropy are kept. That is the
    quantile of 1 - share, rounded up to an entropy that there is. It is found by bisection over float32 numbers: 31 sums over ranks of
    one count, whatever the number of tokens. All ranks call it.

    Args:
        share: above 0, at most 1.
        over_ranks: gives the element-wise sums over all ranks.
    """
    bits_P = (entropies_P.float().clamp(min=0) + 0.0).view(torch.int32)

    def count(least: int) -> int:
        return round(over_ranks([float(((bits_P >= least) & (mask_P > 0)).sum())])[0])

    wanted = math.floor(share * max(count(0) - 1, 0) + 1e-9) + 1
    low, high = 0, _ABOVE_ALL
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) >= wanted else (low, middle)
    return ((bits_P >= low) & (mask_P > 0)).float()
