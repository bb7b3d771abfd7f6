"""What the responses of a group have in common at their beginning.

Tokens that good and bad responses share are pushed up and down alike: the gradient there is what is left of large terms that cancel.
Cosmos-RL leaves them out of the loss (`min_filter_prefix_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from hpcrl.algorithms.filters import varied


def maximal_prefixes(responses: Sequence[Sequence[int]], least: int) -> list[tuple[int, list[int]]]:
    """Return length and members of each prefix that several responses share, and none of them shares more with another.

    A response belongs to one prefix at most: what it shares with members of a longer prefix does not count.

    Args:
        responses: token ids of each response.
        least: tokens that a prefix must have.
    """
    order = sorted(range(len(responses)), key=lambda at: list(responses[at]))
    # among sorted responses, those with a prefix in common are neighbours
    arrays = [np.asarray(response) for response in responses]
    shared = [common_prefix(arrays[one], arrays[other]) for one, other in pairwise(order)]
    runs = [(length, len(list(run))) for length, run in groupby(shared)]
    found, begin = [], 0
    for at, (length, size) in enumerate(runs):
        longer_beside = any(runs[beside][0] > length for beside in (at - 1, at + 1) if 0 <= beside < len(runs))
        if length >= max(least, 1) and not longer_beside:
            found.append((length, sorted(order[begin : begin + size + 1])))
        begin += size
    return found


def shared_prefixes(responses: Sequence[Sequence[int]], rewards: Sequence[float], least: int) -> list[int]:
    """Return how many tokens at the beginning of each response are left out of the loss.

    Those are maximal prefixes of `least` tokens or more whose members differ in reward. A response that is nothing but such a
    prefix keeps all its tokens.

    Args:
        responses: token ids of each response of a group.
        rewards: of each response.
    """
    left_out = [0] * len(responses)
    for length, members in maximal_prefixes(responses, least):
        if varied([rewards[member] for member in members]):
            for member in members:
                left_out[member] = length if length < len(responses[member]) else 0
    return left_out


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return with how many tokens two rows, or responses, begin alike."""
    size = min(len(one), len(other))
    different = one[:size] != other[:size]
    return int(different.argmax()) if different.any() else size
