"""The optimal baseline at each position of a group's responses, whichever ranks they are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_EPSILON = 1e-8
_SLICE = 1 << 18  # numbers that ranks add up at a time


def token_baselines(
    returns_P: torch.Tensor,
    norms_P: torch.Tensor,
    mask_P: torch.Tensor,
    lengths: Sequence[int],
    groups_B: torch.Tensor,
    longest: Sequence[int],
    total: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the baseline of each trained token, [P] float64 (optimal token baseline, arXiv:2602.07078); 0 elsewhere.

    B_t is the mean over the group of the returns G_t from position t on, weighted by W_t, the sum of the squared norms up to it. It is the b
    for which the sum of W_t (G_t - b)^2 over the group is least. Positions count trained tokens alone. At those that one response alone has, B_t is 0,
    as in its authors' code. Ranks add up what they have of each position, so that the division of samples does not matter. All ranks call it.

    W_t has 1e-8 more than that sum: where responses begin with tokens that are certain, B_t is the plain mean, and equal returns leave nothing. The authors'
    code adds it to the divisor alone, so that there B_t falls to 0.

    Args:
        returns_P, norms_P, mask_P: float64, as of AdvantageInputs, tokens of this rank's samples.
        lengths, groups_B, longest, total: as of AdvantageInputs.
    """
    lengths_B, trained_P = torch.tensor(lengths, dtype=torch.int64), mask_P > 0
    weights_P = _within(torch.where(trained_P, norms_P, 0.0), lengths_B) + _EPSILON
    firsts = torch.tensor([0, *longest], dtype=torch.int64).cumsum(0)
    # the column of each position, those of a group after those of the group before it
    columns_P = firsts[groups_B].repeat_interleave(lengths_B) + _within(trained_P.long(), lengths_B) - 1
    columns_N = columns_P[trained_P]
    rows_3N = torch.stack([returns_P * weights_P, weights_P, torch.ones_like(weights_P)])[:, trained_P]
    sums_3C = rows_3N.new_zeros(3, int(firsts[-1])).index_add_(1, columns_N, rows_3N)
    summed, weights, counts = torch.cat([total(part.flatten()).view(3, -1) for part in sums_3C.split(_SLICE, 1)], 1)
    baselines_C = torch.where(counts > 1, summed / weights, 0.0)
    return torch.zeros_like(returns_P).index_put((trained_P.nonzero()[:, 0],), baselines_C[columns_N])


def _within(values_P: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return the sums of each entry and those before it in its sample, [P]."""
    sums_P = values_P.cumsum(0)
    before_B = torch.cat([sums_P.new_zeros(1), sums_P])[lengths_B.cumsum(0) - lengths_B]
    return sums_P - before_B.repeat_interleave(lengths_B)
