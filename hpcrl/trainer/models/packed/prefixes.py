"""Which tokens of packed samples are computed, where what they begin with alike is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from hpcrl.algorithms.prefixes import common_prefix
from hpcrl.types import SharedPrefixes


def common_prefixes(token_ids: torch.Tensor, lengths: Sequence[int]) -> list[int]:
    """Return with how many tokens each packed sample begins as the sample before it does; 0 for the first.

    Args:
        token_ids: [P], on the CPU.
    """
    samples = [ids.numpy() for ids in token_ids.split(list(lengths))]
    return [0, *(common_prefix(one, other) for one, other in pairwise(samples))][: len(samples)]


def shared_prefixes(lengths: Sequence[int], common: Sequence[int]) -> SharedPrefixes | None:
    """Return which tokens of packed samples are computed; None: all of them.

    The last token of a sample always is, so that none is without a token of its own.

    Args:
        lengths: tokens of each sample.
        common: as `common_prefixes` gives it; that of the first does not count.
    """
    skipped = [0, *(min(size, length - 1) for size, length in zip(common[1:], lengths[1:], strict=True))]
    if not any(skipped):
        return None
    own = [length - size for length, size in zip(lengths, skipped, strict=True)]
    places, made = list[torch.Tensor](), 0
    for size, count in zip(skipped, own, strict=True):
        before = places[-1][:size] if size else torch.zeros(0, dtype=torch.int64)
        places.append(torch.cat([before, torch.arange(made, made + count)]))
        made += count
    starts = accumulate(lengths, initial=0)
    kept = [torch.arange(at + size, at + length) for at, size, length in zip(starts, skipped, lengths, strict=False)]
    cu_lengths = torch.tensor([0, *accumulate(own)], dtype=torch.int32)
    return SharedPrefixes(own, cu_lengths, torch.cat(kept), torch.cat(places))
