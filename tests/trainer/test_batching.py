from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.trainer.batching import (
    MicroBatchLimit,
    MiniBatchPlan,
    RowRef,
    assign_to_ranks,
    balanced,
    computed,
    idle_share,
    mini_batches,
    plan_shares,
    planned,
    split_micro_batches,
    whole_groups,
)
from hpcrl.types import Batch, GroupMeta
from tests.rows import group_meta

SAMPLES = MicroBatchLimit(1)


def meta(lengths: list[int], shared: Sequence[int] = ()) -> GroupMeta:
    zeros = [0.0] * len(lengths)
    return group_meta(
        rewards=zeros, lengths=lengths, response_lengths=lengths, stop_reasons=["stop"] * len(lengths), shared=shared
    )


def refs_of(lengths: Sequence[int]) -> list[RowRef]:
    return [RowRef(0, index, length) for index, length in enumerate(lengths)]


def skewed(count: int, seed: int = 0) -> list[RowRef]:
    """Most samples short, some very long, as of a policy that reasons."""
    draw = random.Random(seed)
    return refs_of([min(16384, 100 + int(draw.lognormvariate(7, 0.8))) for _ in range(count)])


def tokens(refs: Sequence[RowRef]) -> int:
    return sum(ref.length for ref in refs)


def test_ranks_that_score_whole_groups_have_equal_work() -> None:
    groups = [[RowRef(0, 0, 900)], *([RowRef(at, index, 100) for index in range(8)] for at in (1, 2))]
    assert whole_groups(groups, 2, MicroBatchLimit(1)) == [[0], [1, 2]]
    groups = [[RowRef(0, 0, 900)], [RowRef(1, index, 100) for index in range(12)], [RowRef(2, 0, 500)]]
    assert whole_groups(groups, 2, MicroBatchLimit(1)) == [[1], [0, 2]]
    assert whole_groups(groups, 2, MicroBatchLimit(1, quadratic=0.01)) == [[0], [1, 2]]


def test_mini_batches_are_consecutive_groups() -> None:
    batch = Batch(1, [meta([3, 4]), meta([5]), meta([6])], 3)
    first, second = mini_batches(batch, 2)
    assert first == [RowRef(0, 0, 3), RowRef(0, 1, 4), RowRef(1, 0, 5)]
    assert second == [RowRef(2, 0, 6)]


@pytest.mark.parametrize("limit", [SAMPLES, MicroBatchLimit(3), MicroBatchLimit(1, 3000)])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_pairs_stay_together_in_one_micro_batch(ranks: int, limit: MicroBatchLimit) -> None:
    draw = random.Random(0)
    refs = [RowRef(group, index, draw.randint(1, 1000)) for group in range(20) for index in range(2)]
    plan = planned(refs, ranks, (limit, limit), pairs=True)
    assert sorted((ref.group, ref.index) for share in plan.shares for ref in share) == [
        (ref.group, ref.index) for ref in refs
    ]
    for share, *both in zip(plan.shares, plan.train, plan.score, strict=True):
        for parts in both:
            assert [at for part in parts for at in part] == list(range(len(share)))
            for part in parts:
                own = [share[at] for at in part]
                assert [ref.index for ref in own] == [0, 1] * (len(own) // 2)
                assert [ref.group for ref in own[::2]] == [ref.group for ref in own[1::2]]
                if limit.tokens is None:
                    assert len(own) <= 2 * limit.rows
                else:
                    assert tokens(own) <= limit.tokens or len(own) == 2
    assert len({len(parts) for parts in plan.train}) == 1


@pytest.mark.parametrize("limit", [SAMPLES, MicroBatchLimit(1, 8000)])
@pytest.mark.parametrize("ranks", [1, 2, 7, 8])
def test_deal_is_complete_and_orders_shares(ranks: int, limit: MicroBatchLimit) -> None:
    draw = random.Random(0)
    refs = [RowRef(group, index, draw.randint(1, 4000)) for group in range(32) for index in range(16)]
    shares = planned(refs, ranks, (limit, limit)).shares
    assert sorted((p.group, p.index) for share in shares for p in share) == [(p.group, p.index) for p in refs]
    assert max(map(tokens, shares)) - min(map(tokens, shares)) <= 4000
    if limit.tokens is None:
        assert all([p.length for p in s] == sorted((p.length for p in s), reverse=True) for s in shares)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("limit", [SAMPLES, MicroBatchLimit(1, 10)])
def test_deal_does_not_depend_on_the_order_it_is_given(limit: MicroBatchLimit) -> None:
    refs = [RowRef(group, index, 5) for group in range(4) for index in range(3)]
    assert planned(refs, 3, (limit, limit)) == planned(refs[::-1], 3, (limit, limit))


def test_a_token_limit_deals_equal_tokens() -> None:
    refs = skewed(64 * 16)
    mean = tokens(refs) / 64
    by_samples, by_tokens = (
        max(map(tokens, planned(refs, 64, (limit, limit)).shares)) for limit in (SAMPLES, MicroBatchLimit(1, 32768))
    )
    assert by_samples > 1.15 * mean
    assert by_tokens < 1.02 * mean


def test_every_rank_runs_the_same_number_of_micro_batches() -> None:
    shares = assign_to_ranks(refs_of([5] * 5), 4)
    assert split_micro_batches(shares, SAMPLES) == [[[0], []], [[0], []], [[0], []], [[0], [1]]]
    assert split_micro_batches([refs_of([3, 2, 1])], MicroBatchLimit(2)) == [[[0, 1], [2]]]


@pytest.mark.parametrize("limit", [SAMPLES, MicroBatchLimit(1, 8)])
def test_ranks_without_a_sample_run_too(limit: MicroBatchLimit) -> None:
    assert planned([], 2, (limit, limit)).train == [[range(0)], [range(0)]]
    assert [len(parts) for parts in planned(refs_of([7]), 3, (limit, limit)).train] == [1, 1, 1]


def test_a_token_limit_makes_few_and_equal_micro_batches() -> None:
    refs = refs_of([5, 9, 3, 12, 7, 1, 8])
    (parts,) = split_micro_batches([refs], MicroBatchLimit(1, 16))
    assert [sum(refs[at].length for at in part) for part in parts] == [15, 15, 15]
    assert parts[0] == [2, 3], "the longest sample, whose attention costs most, comes first"


def test_a_sample_beyond_the_limit_is_a_micro_batch_of_its_own() -> None:
    (parts,) = split_micro_batches([refs_of([3, 100, 3, 30])], MicroBatchLimit(1, 10))
    assert parts == [[1], [3], [0, 2]]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=24),
    ranks=st.integers(1, 4),
    limit=st.builds(
        MicroBatchLimit, st.integers(1, 5), st.none() | st.integers(1, 60), st.just(False), st.sampled_from([0.0, 0.1])
    ),
)
def test_micro_batches_hold_every_sample_once_and_no_more_than_they_may(
    lengths: list[int], ranks: int, limit: MicroBatchLimit
) -> None:
    plan = planned(refs_of(lengths), ranks, (limit, limit))
    assert sorted(ref.index for share in plan.shares for ref in share) == list(range(len(lengths)))
    assert len({len(parts) for parts in plan.train}) == 1
    for share, parts in zip(plan.shares, plan.train, strict=True):
        assert sorted(at for part in parts for at in part) == list(range(len(share)))
        for part in parts:
            if limit.tokens is None:
                assert len(part) <= limit.rows
            else:
                assert len(part) < 2 or tokens([share[at] for at in part]) <= limit.tokens
    if limit.tokens is not None and len(lengths) > 1:
        # all ranks have something in all micro-batches but the last
        assert all(part for parts in plan.train for part in parts[:-1])


@given(lengths=st.lists(st.integers(1, 100), max_size=7), parts=st.integers(1, 3))
def test_balanced_parts_are_near_the_best(lengths: list[int], parts: int) -> None:
    def largest(where: Sequence[int]) -> int:
        return max(
            sum(length for length, part in zip(lengths, where, strict=True) if part == at) for at in range(parts)
        )

    found = balanced(lengths, parts)
    assert sorted(at for part in found for at in part) == list(range(len(lengths)))
    best = min(largest(where) for where in product(range(parts), repeat=len(lengths)))
    assert max(sum(lengths[at] for at in part) for part in found) <= 4 / 3 * best


def test_ranks_wait_less_with_a_token_limit() -> None:
    refs = skewed(64 * 16)
    plans = [planned(refs, 64, (limit, limit)) for limit in (MicroBatchLimit(4), MicroBatchLimit(4, 32768))]
    by_samples, by_tokens = (idle_share(plan.shares, plan.train) for plan in plans)
    assert by_samples > 0.1
    assert by_tokens < 0.05
    assert idle_share([[], []], [[[]], [[]]]) == 0
    assert idle_share([refs_of([3]), refs_of([1])], [[[0]], [[0]]]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("ranks", "longest", "less"), [(8, 16384, 0.1), (64, 16384, 0.05), (8, 65536, 0.85)])
def test_ranks_wait_less_where_attention_counts(ranks: int, longest: int, less: float) -> None:
    """Of Qwen3-0.6B, whose attention over 7,680 tokens costs what its layers cost. With 65536 tokens a single sample is dearer than a fair part."""
    draw, quadratic, tokens = random.Random(0), 1 / 7680, max(longest, 32768)
    spread = 7, 0.8 if longest == 16384 else 1.2
    refs = refs_of([min(longest, 100 + int(draw.lognormvariate(*spread))) for _ in range(16 * ranks)])
    waits = []
    for limit in (MicroBatchLimit(1, tokens), MicroBatchLimit(1, tokens, quadratic=quadratic)):
        plan = planned(refs, ranks, (limit, limit))
        waits.append(idle_share(plan.shares, plan.train, quadratic))
    assert waits[1] < less * waits[0], waits


def test_the_dearest_sample_is_not_joined_by_others() -> None:
    refs, limit = refs_of([100, 30, 30, 30, 10]), MicroBatchLimit(1, 130, quadratic=0.1)
    assert [[ref.length for ref in share] for share in planned(refs, 2, (limit, limit)).shares] == [
        [100],
        [30, 30, 30, 10],
    ]
    assert limit.cost(refs[:2]) == 130 + 0.1 * (100**2 + 30**2)
    assert limit.cost([RowRef(0, 0, 9), RowRef(0, 1, 9, 6)]) == pytest.approx(9 + 8.1 + 3 + 0.1 * (81 - 36))


def group_of(at: int, prompt: int, answers: Sequence[int]) -> list[RowRef]:
    return [RowRef(at, index, prompt + answer, prompt if index else 0) for index, answer in enumerate(answers)]


def parts_of(plan: MiniBatchPlan) -> list[list[list[RowRef]]]:
    """Return the samples of each micro-batch of each rank."""
    return [
        [share[part.start : part.stop] for part in parts] for share, parts in zip(plan.shares, plan.train, strict=True)
    ]


def sharing(tokens: int) -> tuple[MicroBatchLimit, MicroBatchLimit]:
    return MicroBatchLimit(1, tokens, True), MicroBatchLimit(1, tokens, True)


def test_what_samples_share_is_counted_once_where_they_are_together() -> None:
    first, second = group_of(0, 100, [5, 6, 7]), group_of(1, 50, [1, 2])
    assert computed([*first, *second]) == [105, 6, 7, 51, 2]
    assert computed(first[1:]) == [106, 7], "the first of a micro-batch has no sample before it"
    assert computed([first[0], first[2]]) == [105, 107]
    assert computed([RowRef(0, 0, 9), RowRef(0, 1, 9, 9)]) == [9, 1], "a last token is computed"
    assert computed([]) == []


def test_metadata_say_what_is_shared() -> None:
    known = meta([8, 9], [0, 7])
    batch = Batch(1, [known, meta([5, 5])], 2)
    assert mini_batches(batch, 2) == [[*refs_of([8, 9]), RowRef(1, 0, 5), RowRef(1, 1, 5)]]
    assert mini_batches(batch, 2, shared=True)[0][:2] == [RowRef(0, 0, 8), RowRef(0, 1, 9, 7)]


def test_a_group_is_one_micro_batch_where_it_fits() -> None:
    groups = [group_of(at, 512, [128] * 8) for at in range(4)]
    plan = planned(list(chain(*groups)), 2, sharing(1536))
    assert sorted(chain(*parts_of(plan)), key=lambda part: part[0].group) == groups
    assert plan.computed == [640, *[128] * 7] * 4
    assert plan.train == plan.score
    halves = planned(list(chain(*groups)), 2, sharing(1100))
    assert sorted(len(part) for parts in parts_of(halves) for part in parts) == [4] * 8


@pytest.mark.parametrize(("ranks", "rows"), [(1, 8), (2, 8), (4, 4), (8, 2), (16, 1)])
def test_groups_are_cut_where_there_are_more_ranks(ranks: int, rows: int) -> None:
    """Two groups of eight."""
    plan = planned([*group_of(0, 512, [128] * 8), *group_of(1, 512, [128] * 8)], ranks, sharing(10000))
    assert all(len(share) == 16 // ranks for share in plan.shares)
    assert {len({ref.group for ref in share}) for share in plan.shares} == {2 if ranks == 1 else 1}
    assert sum(plan.computed) == 16 * 128 + 16 // rows * 512


@settings(deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=6
    ),
    ranks=st.integers(1, 4),
    tokens=st.integers(1, 80),
)
def test_micro_batches_of_shared_prefixes_hold_every_sample_once(
    groups: list[tuple[int, list[int]]], ranks: int, tokens: int
) -> None:
    refs = [ref for at, (prompt, answers) in enumerate(groups) for ref in group_of(at, prompt, answers)]
    plan = planned(refs, ranks, sharing(tokens))
    kept = plan_shares(plan.shares, sharing(tokens))
    assert [sorted(share, key=refs.index) for share in kept.shares] == [
        sorted(share, key=refs.index) for share in plan.shares
    ]
    for one in (plan, kept):
        assert sorted(chain(*one.shares), key=refs.index) == refs
        assert len({len(parts) for parts in one.train}) == 1
        for share, parts in zip(one.shares, one.train, strict=True):
            assert [at for part in parts for at in part] == list(range(len(share)))
        for part in chain(*parts_of(one)):
            assert len(part) < 2 or sum(computed(part)) <= tokens
