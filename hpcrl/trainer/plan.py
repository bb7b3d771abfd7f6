"""Who trains what: a batch becomes mini-batches, a mini-batch is dealt to the ranks, a rank's share is cut into passes.

Everything follows from the batch's metadata, so every rank works out the same plan without a word to the others, and reads
only the groups that it was dealt samples of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpcrl.types import Batch

Item = TypeVar("Item")


@dataclass(frozen=True)
class Pick:
    """A sample by its place: sample `index` of group `group` of the batch, `length` tokens long."""

    group: int
    index: int
    length: int


def mini_batches(batch: Batch, size: int) -> list[list[Pick]]:
    """Return the samples of each optimizer step: consecutive slices of `size` groups, the last one maybe smaller."""
    assert size > 0
    return [
        [Pick(at, index, length) for at in range(start, end) for index, length in enumerate(batch.groups[at].lengths)]
        for start in range(0, len(batch.groups), size)
        for end in [min(start + size, len(batch.groups))]
    ]


def deal(picks: Sequence[Pick], ranks: int) -> list[list[Pick]]:
    """Return each rank's share, longest sample first.

    Dealt from the longest to the shortest, back and forth, so that shares differ by at most one sample and by few tokens, and the
    ranks' passes of the same number are of similar size.
    """
    longest_first = sorted(picks, key=lambda pick: (-pick.length, pick.group, pick.index))
    shares: list[list[Pick]] = [[] for _ in range(ranks)]
    for start in range(0, len(longest_first), ranks):
        row = longest_first[start : start + ranks]
        order = range(ranks) if (start // ranks) % 2 == 0 else reversed(range(ranks))
        for pick, rank in zip(row, order, strict=False):
            shares[rank].append(pick)
    return shares


def passes(shares: Sequence[Sequence[Pick]], size: int) -> int:
    """Return how many passes of `size` samples the largest share needs: what every rank runs, since each is a collective."""
    return max(-(-len(share) // size) for share in shares)


def cut(share: Sequence[Item], size: int, count: int) -> list[Sequence[Item]]:
    """Return `count` consecutive slices of at most `size` entries; the last ones may be empty."""
    assert len(share) <= size * count
    return [share[number * size : (number + 1) * size] for number in range(count)]
