"""Plan of a batch: mini-batches, the ranks' rows, and the micro-batches of each rank.

Everything follows from the batch's metadata, so every rank works out the same plan without communication, and reads only the
rows that are its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, chain, zip_longest

from hpcrl.algorithms.filters import is_worth_training
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.types import Batch, GroupMeta

_TRIED = 8  # micro-batches, cheapest first, in which room for a row is looked for


@dataclass(frozen=True)
class RowRef:
    """A row by its place: row `index` of group `group` of the batch, `length` tokens long.

    Attributes:
        shared: with so many tokens it begins as the one before it in its group does; 0: they are computed for each, or not known.
    """

    group: int
    index: int
    length: int
    shared: int = 0

    def follows(self, other: RowRef) -> bool:
        """Return whether it is the next one of the same group."""
        return (self.group, self.index) == (other.group, other.index + 1)


@dataclass(frozen=True)
class MicroBatchLimit:
    """What a micro-batch holds at most: `rows` rows or, where `tokens` is given, that many tokens instead.

    A row of more tokens than that is a micro-batch of its own.

    Attributes:
        shared: what its rows begin with alike is computed once, and counted once among the tokens.
        quadratic: a row of T tokens costs as much as T + quadratic T^2 tokens without attention.
    """

    rows: int
    tokens: int | None = None
    shared: bool = False
    quadratic: float = 0.0

    def cost(self, refs: Sequence[RowRef]) -> float:
        """Return what a micro-batch of these rows costs, in tokens without attention."""
        return compute_cost(refs, self.quadratic)


Limits = tuple[MicroBatchLimit, MicroBatchLimit]
"""What a micro-batch holds at most in training, and in passes without gradient."""


def longest_first(ref: RowRef) -> tuple[int, int, int]:
    """Return the key of the order in which a share lists its rows."""
    return -ref.length, ref.group, ref.index


def mini_batches(batch: Batch, size: int, *, shared: bool = False) -> list[list[RowRef]]:
    """Return the rows of each optimizer step: consecutive slices of `size` groups, the last one maybe smaller.

    Args:
        shared: as of MicroBatchLimit.
    """
    assert size > 0
    return [
        [
            ref
            for at in range(start, min(start + size, len(batch.groups)))
            for ref in rows_of(at, batch.groups[at], shared=shared)
        ]
        for start in range(0, len(batch.groups), size)
    ]


def rows_of(at: int, group: GroupMeta, *, shared: bool) -> list[RowRef]:
    """Return the rows of group `at`; `shared` as of MicroBatchLimit."""
    rows = (
        row
        for sample in group.samples
        for row in zip_longest(sample.lengths, sample.shared if shared else (), fillvalue=0)
    )
    return [RowRef(at, index, *row) for index, row in enumerate(rows)]


def computed(refs: Sequence[RowRef]) -> list[int]:
    """Return how many tokens of each row of a micro-batch are computed: without those that it shares with the row before it."""
    return [
        ref.length - (min(ref.shared, ref.length - 1) if last is not None and ref.follows(last) else 0)
        for last, ref in zip([None, *refs], refs, strict=False)
    ]


def compute_cost(refs: Sequence[RowRef], quadratic: float) -> float:
    """Return the cost of rows of a micro-batch, in tokens without attention; `quadratic` as of MicroBatchLimit."""
    return sum(
        own + quadratic * (ref.length**2 - (ref.length - own) ** 2)
        for ref, own in zip(refs, computed(refs), strict=True)
    )


def assign_to_ranks(refs: Sequence[RowRef], ranks: int) -> list[list[RowRef]]:
    """Return each rank's share, longest row first, for micro-batches that are limited by rows.

    Every rank gets equally many rows, but for one. They are dealt from the longest to the shortest, back and forth, so that the ranks'
    micro-batches of the same number are of similar size.
    """
    ordered = sorted(refs, key=longest_first)
    shares: list[list[RowRef]] = [[] for _ in range(ranks)]
    for start in range(0, len(ordered), ranks):
        row = ordered[start : start + ranks]
        order = range(ranks) if (start // ranks) % 2 == 0 else reversed(range(ranks))
        for ref, rank in zip(row, order, strict=False):
            shares[rank].append(ref)
    return shares


def aligned(
    units: Sequence[RowRef], ranks: int, tokens: int, cost: Callable[[RowRef], float]
) -> list[list[list[RowRef]]]:
    """Return the micro-batches of every rank, equally many, so that those of the same number cost about the same: ranks wait for the slowest.

    The dearest are placed first, each where least is so far. No rank gets more than the dearest one costs, or than its part of
    what is left; what does not fit goes into the next micro-batches.

    Args:
        tokens: of a micro-batch at most; a unit of more is alone.
        cost: of a unit.
    """
    costs = {unit: cost(unit) for unit in units}
    left, found = sorted(units, key=lambda unit: (-costs[unit], longest_first(unit))), []
    while left or not found:
        passes = -(-sum(unit.length for unit in left) // (tokens * ranks))
        fair = sum(costs[unit] for unit in left) / max(1, passes * ranks)
        most = math.inf if passes <= 1 else max(costs[left[0]], fair) * (1 + 1e-9)
        row, left = _one_of_each_rank(left, ranks, tokens, most, costs)
        found.append(row)
    return [[row[rank] for row in found] for rank in range(ranks)]


def _one_of_each_rank(
    units: Sequence[RowRef], ranks: int, tokens: int, most: float, costs: Mapping[RowRef, float]
) -> tuple[list[list[RowRef]], list[RowRef]]:
    """Return a micro-batch of each rank, and what is left; arguments as of `aligned`, `most` what one may cost that is not alone."""
    row, sizes, rest = [list[RowRef]() for _ in range(ranks)], [0] * ranks, list[RowRef]()
    cheapest = [(0.0, rank) for rank in range(ranks)]
    for unit in units:
        full, found = list[tuple[float, int]](), False
        while cheapest and len(full) < _TRIED and not found:
            total, rank = heappop(cheapest)
            found = not row[rank] or (total + costs[unit] <= most and sizes[rank] + unit.length <= tokens)
            if found:
                row[rank].append(unit)
                sizes[rank] += unit.length
                total += costs[unit]
            full.append((total, rank))
            if total + costs[unit] > most:
                break
        for each in full:
            heappush(cheapest, each)
        if not found:
            rest.append(unit)
    return row, rest


def split_micro_batches(shares: Sequence[Sequence[RowRef]], limit: MicroBatchLimit) -> list[list[list[int]]]:
    """Return the micro-batches of every rank, each as places in the rank's share.

    Each is a collective, so that all ranks have the same number of them, one at least; some may be empty. The largest come
    first: ranks wait for the slowest of those that run at the same time.

    Args:
        shares: of all ranks.
    """
    lengths = [[ref.length for ref in share] for share in shares]
    if limit.tokens is None:
        most = max(1, *(-(-len(share) // limit.rows) for share in shares))
        starts = [number * limit.rows for number in range(most)]
        return [[list(range(len(share)))[start : start + limit.rows] for start in starts] for share in shares]
    most = max(1, *(_fewest(own, limit.tokens) for own in lengths))
    return [_largest_first(own, balanced(own, most)) for own in lengths]


def balanced(lengths: Sequence[float], parts: int) -> list[list[int]]:
    """Return the places of `lengths` in `parts` parts of about equal sums, each in ascending order.

    The longest comes first and each goes where least is so far: no sum exceeds 4/3 of the smallest possible largest sum
    (R. L. Graham, SIAM J. Appl. Math. 17, 1969).
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    least = [(0.0, part) for part in range(parts)]
    for at in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        total, part = least[0]
        found[part].append(at)
        heapreplace(least, (total + lengths[at], part))
    return [sorted(part) for part in found]


def _fewest(lengths: Sequence[int], tokens: int) -> int:
    """Return into how many balanced parts these rows go, so that none but a single row has more than `tokens`."""
    short = [length for length in lengths if length <= tokens]
    bounds = range(-(-sum(short) // tokens), len(short) + 1)

    def fits(parts: int) -> bool:
        return all(sum(short[at] for at in part) <= tokens for part in balanced(short, parts))

    return len(lengths) - len(short) + bounds[bisect_left(bounds, True, key=fits)]


def _largest_first(lengths: Sequence[int], parts: list[list[int]]) -> list[list[int]]:
    # sums are about equal, but attention costs the square of a row's length
    return sorted(parts, key=lambda part: (-sum(lengths[at] ** 2 for at in part), part))


def idle_share(
    shares: Sequence[Sequence[RowRef]], micro_batches: Sequence[Sequence[Sequence[int]]], quadratic: float = 0.0
) -> float:
    """Return the share of the ranks' time that they wait, 0 to 1, where all wait for the dearest of micro-batches of the same number.

    Args:
        micro_batches: of all ranks, as `split_micro_batches` gives them.
        quadratic: as of MicroBatchLimit.
    """
    sums = [
        [compute_cost([share[at] for at in part], quadratic) for part in parts]
        for share, parts in zip(shares, micro_batches, strict=True)
    ]
    slots = len(shares) * sum(max(same) for same in zip(*sums, strict=True))
    return 1 - sum(map(sum, sums)) / slots if slots else 0.0


@dataclass(frozen=True)
class MiniBatchPlan:
    """Who trains what in one optimizer step; every rank works out the same.

    Attributes:
        shares: of each rank, its rows in the order of its micro-batches.
        train: of each rank, its micro-batches as ranges of places in its share; equally many on every rank, some maybe empty.
        score: the same for passes without gradient.
        quadratic: as of MicroBatchLimit.
    """

    shares: list[list[RowRef]]
    train: list[list[range]]
    score: list[list[range]]
    quadratic: float = 0.0

    @property
    def groups(self) -> set[int]:
        return {ref.group for share in self.shares for ref in share}

    @property
    def rows(self) -> int:
        return sum(map(len, self.shares))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row of all ranks."""
        return [ref.length for share in self.shares for ref in share]

    @property
    def computed(self) -> list[int]:
        """How many tokens of each row of all ranks are computed where it is trained."""
        return [
            count
            for share, parts in zip(self.shares, self.train, strict=True)
            for part in parts
            for count in computed(share[part.start : part.stop])
        ]


def plan_mini_batch(
    shares: Sequence[Sequence[RowRef]], train: MicroBatchLimit, score: MicroBatchLimit
) -> MiniBatchPlan:
    """Return the micro-batches of shares that each lists its rows with the longest first.

    One order of a share serves both limits: those by rows cut the same list at other places, and one by tokens is the same for both.
    """
    assert train.tokens == score.tokens, f"{train} and {score}"
    parts = split_micro_batches(shares, train)
    ordered = [[share[at] for part in own for at in part] for share, own in zip(shares, parts, strict=True)]
    ranges = [consecutive(own) for own in parts]
    scored = ranges if train.tokens is not None else [consecutive(own) for own in split_micro_batches(shares, score)]
    return MiniBatchPlan(ordered, ranges, scored, train.quadratic)


def planned(refs: Sequence[RowRef], ranks: int, limits: Limits, *, pairs: bool = False) -> MiniBatchPlan:
    """Return who trains what of these rows, of all ranks.

    Args:
        limits: of micro-batches.
        pairs: the rows of a group stay together, in one micro-batch and in their order, and limits count groups.
    """
    limit = limits[0]
    if pairs:
        units = _units(_runs(refs, None, len(refs)))
    elif limit.shared:
        units = _fairest(refs, ranks, limit)
    else:
        units = {ref: [ref] for ref in refs}
    if limit.tokens is None:
        return _plan_units(assign_to_ranks(list(units), ranks), units, limits)
    parts = aligned(list(units), ranks, limit.tokens, lambda unit: limit.cost(units[unit]))
    runs = [[[ref for unit in part for ref in units[unit]] for part in own] for own in parts]
    ranges = [consecutive([range(len(run)) for run in own]) for own in runs]
    return MiniBatchPlan([list(chain(*own)) for own in runs], ranges, ranges, limit.quadratic)


def plan_shares(shares: Sequence[Sequence[RowRef]], limits: Limits) -> MiniBatchPlan:
    """Return the micro-batches of rows that stay on their ranks."""
    if not limits[0].shared:
        return plan_mini_batch([sorted(share, key=longest_first) for share in shares], *limits)
    units = [_units(_runs(share, limits[0].tokens, len(share))) for share in shares]
    everyone = {unit: run for own in units for unit, run in own.items()}
    return _plan_units([sorted(own, key=longest_first) for own in units], everyone, limits)


def whole_groups(groups: Sequence[Sequence[RowRef]], ranks: int, limit: MicroBatchLimit) -> list[list[int]]:
    """Return the groups of each rank, all whole, with about equal cost per rank."""
    return balanced([limit.cost(refs) for refs in groups], ranks)


Units = dict[RowRef, list[RowRef]]
"""Rows of a group that follow one another, and stay together, by what stands for them: the first one, as long as they are together."""


def _units(runs: Sequence[list[RowRef]]) -> Units:
    return {RowRef(run[0].group, run[0].index, sum(computed(run))): run for run in runs}


def _runs(refs: Sequence[RowRef], tokens: int | None, rows: int) -> list[list[RowRef]]:
    """Return the rows of each group, cut where one does not follow another, or there would be more than so many tokens or rows."""
    runs: list[list[RowRef]] = []
    size = 0
    for ref in sorted(refs, key=lambda ref: (ref.group, ref.index)):
        size += computed([*runs[-1][-1:], ref])[-1] if runs else 0
        fits = tokens is None or size <= tokens
        if runs and ref.follows(runs[-1][-1]) and len(runs[-1]) < rows and fits:
            runs[-1].append(ref)
        else:
            runs.append([ref])
            size = ref.length
    return runs


def _fairest(refs: Sequence[RowRef], ranks: int, limit: MicroBatchLimit) -> Units:
    """Return groups whole, halved, or cut into four and so on, so that the share of the rank that has most work is smallest.

    Each part computes the group's prefix again.
    """
    rows = max((ref.index for ref in refs), default=0) + 1
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    cuts = [_units(_runs(refs, limit.tokens, size)) for size in sizes]

    def largest(units: Units) -> float:
        costs = [limit.cost(run) for run in units.values()]
        return max(sum(costs[at] for at in part) for part in balanced(costs, ranks))

    return min(cuts, key=largest)


def _plan_units(shares: Sequence[Sequence[RowRef]], units: Units, limits: Limits) -> MiniBatchPlan:
    plan = plan_mini_batch(shares, *limits)
    ends = [[0, *accumulate(len(units[unit]) for unit in share)] for share in plan.shares]

    def of_rows(parts: Sequence[Sequence[range]]) -> list[list[range]]:
        return [
            [range(own[part.start], own[part.stop]) for part in each] for own, each in zip(ends, parts, strict=True)
        ]

    whole = [[ref for unit in share for ref in units[unit]] for share in plan.shares]
    return MiniBatchPlan(whole, of_rows(plan.train), of_rows(plan.score), plan.quadratic)


def consecutive(parts: Sequence[Sequence[int]]) -> list[range]:
    """Return ranges that follow one another, as long as `parts` are."""
    ends = list(accumulate(map(len, parts)))
    return [range(end - len(part), end) for part, end in zip(parts, ends, strict=True)]


def trained_groups(batch: Batch, algorithm: AlgorithmConfig) -> list[int]:
    """Return which groups of the batch are trained: all, or with zero_variance_filter those whose rewards differ.

    Where the advantage estimator compares turns, those are rewards of turns too. The other groups are not even read, and no reduction of the
    loss counts them.
    """
    groups, metrics = range(len(batch.groups)), algorithm.filter_reward_metric
    tolerance = algorithm.zero_variance_filter_tol
    if not algorithm.zero_variance_filter:
        return list(groups)
    # with torch, which a plan of micro-batches needs not
    from hpcrl.algorithms.advantages import ESTIMATORS, is_per_turn
    from hpcrl.algorithms.settings import configured

    turns = is_per_turn(configured("advantage_estimator", algorithm.advantage_estimator, ESTIMATORS, algorithm).func)
    return [at for at in groups if is_worth_training(batch.groups[at], metrics, tolerance, turns=turns)]


def micro_batch_limits(trainer: TrainerConfig, tokens: int | None, quadratic: float = 0.0) -> Limits:
    """Return them, with `tokens` as hpcrl.config.token_limits.micro_batch_tokens finds them; `quadratic` as of MicroBatchLimit."""
    train = trainer.micro_train_batch_size_per_gpu or 1
    score = trainer.micro_forward_batch_size_per_gpu or train
    shared = trainer.shared_prefixes
    return MicroBatchLimit(train, tokens, shared, quadratic), MicroBatchLimit(score, tokens, shared, quadratic)
