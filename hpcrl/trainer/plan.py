"""Who trains what: a batch becomes mini-batches, a mini-batch is dealt to the ranks, a rank's share is cut into micro-batches.

Everything follows from the batch's metadata, so every rank works out the same plan without a word to the others, and reads
only the groups that it was dealt samples of.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

from hpcrl.types import Batch


@dataclass(frozen=True)
class Pick:
    """A row by its place: row `index` of group `group` of the batch, `length` tokens long.

    A row is a sample, or with generator.step_wise_trajectories a turn of one; what is said of samples here and in what follows from
    here is true of rows.
    """

    group: int
    index: int
    length: int


@dataclass(frozen=True)
class Limit:
    """What a micro-batch holds at most: `samples` samples or, where `tokens` is given, that many tokens instead.

    A sample of more tokens than that is a micro-batch of its own.
    """

    samples: int
    tokens: int | None = None


def longest_first(pick: Pick) -> tuple[int, int, int]:
    """Return the key of the order in which a share lists its samples."""
    return -pick.length, pick.group, pick.index


def mini_batches(batch: Batch, size: int) -> list[list[Pick]]:
    """Return the samples of each optimizer step: consecutive slices of `size` groups, the last one maybe smaller."""
    assert size > 0
    return [
        [Pick(at, index, length) for at in range(start, end) for index, length in enumerate(batch.groups[at].lengths)]
        for start in range(0, len(batch.groups), size)
        for end in [min(start + size, len(batch.groups))]
    ]


def deal(picks: Sequence[Pick], ranks: int, limit: Limit) -> list[list[Pick]]:
    """Return each rank's share, longest sample first.

    Micro-batches that are limited by tokens want shares of equal tokens, and may have any number of samples. Those that are
    limited by samples want as many samples on every rank: dealt from the longest to the shortest, back and forth, shares differ
    by at most one sample, and the ranks' micro-batches of the same number are of similar size.
    """
    ordered = sorted(picks, key=longest_first)
    if limit.tokens is not None:
        return [[ordered[at] for at in part] for part in balanced([pick.length for pick in ordered], ranks)]
    shares: list[list[Pick]] = [[] for _ in range(ranks)]
    for start in range(0, len(ordered), ranks):
        row = ordered[start : start + ranks]
        order = range(ranks) if (start // ranks) % 2 == 0 else reversed(range(ranks))
        for pick, rank in zip(row, order, strict=False):
            shares[rank].append(pick)
    return shares


def cut(shares: Sequence[Sequence[Pick]], limit: Limit) -> list[list[list[int]]]:
    """Return the micro-batches of every rank, each as places in the rank's share.

    Each is a collective, so that all ranks have the same number of them, one at least; some may be empty. The largest come
    first: ranks wait for the slowest of those that run at the same time.

    Args:
        shares: of all ranks, as `deal` gives them.
    """
    lengths = [[pick.length for pick in share] for share in shares]
    if limit.tokens is None:
        most = max(1, *(-(-len(share) // limit.samples) for share in shares))
        starts = [number * limit.samples for number in range(most)]
        return [[list(range(len(share)))[start : start + limit.samples] for start in starts] for share in shares]
    most = max(1, *(_fewest(own, limit.tokens) for own in lengths))
    return [_largest_first(own, balanced(own, most)) for own in lengths]


def balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return the places of `lengths` in `parts` parts of about equal sums, each in ascending order.

    The longest comes first and each goes where least is so far: no sum exceeds 4/3 of the smallest possible largest sum
    (R. L. Graham, SIAM J. Appl. Math. 17, 1969).
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    least = [(0, part) for part in range(parts)]
    for at in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        total, part = least[0]
        found[part].append(at)
        heapreplace(least, (total + lengths[at], part))
    return [sorted(part) for part in found]


def _fewest(lengths: Sequence[int], tokens: int) -> int:
    """Return into how many balanced parts these samples go, so that none but a single sample has more than `tokens`."""
    short = [length for length in lengths if length <= tokens]
    bounds = range(-(-sum(short) // tokens), len(short) + 1)

    def fits(parts: int) -> bool:
        return all(sum(short[at] for at in part) <= tokens for part in balanced(short, parts))

    return len(lengths) - len(short) + bounds[bisect_left(bounds, True, key=fits)]


def _largest_first(lengths: Sequence[int], parts: list[list[int]]) -> list[list[int]]:
    # sums are about equal, but attention costs the square of a sample's length
    return sorted(parts, key=lambda part: (-sum(lengths[at] ** 2 for at in part), part))


def idle_share(shares: Sequence[Sequence[Pick]], micro_batches: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return the share of the ranks' token slots that are waited for, 0 to 1, where all wait for the largest of micro-batches of the same number.

    Args:
        micro_batches: of all ranks, as `cut` gives them.
    """
    sums = [
        [sum(share[at].length for at in part) for part in parts]
        for share, parts in zip(shares, micro_batches, strict=True)
    ]
    slots = len(shares) * sum(max(same) for same in zip(*sums, strict=True))
    return 1 - sum(map(sum, sums)) / slots if slots else 0.0
