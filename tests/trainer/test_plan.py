from __future__ import annotations

import random

import pytest

from hpcrl.trainer.plan import Pick, cut, deal, mini_batches, passes
from hpcrl.types import Batch, GroupMeta


def meta(lengths: list[int]) -> GroupMeta:
    zeros = [0.0] * len(lengths)
    return GroupMeta("g", "train", 0, "p", zeros, lengths, lengths, ["stop"] * len(lengths), 0, 0, "x", 1.0)


def test_mini_batches_are_consecutive_groups() -> None:
    batch = Batch(1, [meta([3, 4]), meta([5]), meta([6])], 3)
    first, second = mini_batches(batch, 2)
    assert first == [Pick(0, 0, 3), Pick(0, 1, 4), Pick(1, 0, 5)]
    assert second == [Pick(2, 0, 6)]


@pytest.mark.parametrize("ranks", [1, 2, 7, 8])
def test_deal_is_fair_and_complete(ranks: int) -> None:
    draw = random.Random(0)
    picks = [Pick(group, index, draw.randint(1, 4000)) for group in range(32) for index in range(16)]
    shares = deal(picks, ranks)
    assert sorted((p.group, p.index) for share in shares for p in share) == [(p.group, p.index) for p in picks]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    tokens = [sum(p.length for p in share) for share in shares]
    assert max(tokens) - min(tokens) <= 4000
    assert all([p.length for p in s] == sorted((p.length for p in s), reverse=True) for s in shares)


def test_deal_does_not_depend_on_the_order_it_is_given() -> None:
    picks = [Pick(group, index, 5) for group in range(4) for index in range(3)]
    assert deal(picks, 3) == deal(picks[::-1], 3)


def test_every_rank_runs_the_same_number_of_passes() -> None:
    shares = deal([Pick(0, index, 5) for index in range(5)], 4)
    count = passes(shares, 1)
    assert count == 2
    assert [len(part) for part in cut(shares[0], 1, count)] == [1, 0]
    assert [list(part) for part in cut([1, 2, 3], 2, 2)] == [[1, 2], [3]]
