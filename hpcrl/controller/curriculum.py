"""Which rows of a dataset are trained next, by how often the policy has solved each: rows that teach little come more seldom.

Rows are in pools, by a moving average of their pass rates: easy, trainable, hard, or unseen. The prompt stream passes through the dataset
again and again; the curriculum leaves out some visits of easy and of hard rows. A row that stays in a pool with the share c is
trained in at least one of ceil(1 / c) passes, so that none starves. Its pass rate by then decides its pool.

Group i trains row `Curriculum.row(i)`, on every worker and in every attempt. After a batch is composed, rows are drawn with the pools of that
time, for indices from a bound on that no group begun before can have reached. B are the groups per step, S the staleness, E the surplus
groups, U the groups in batches so far, and D those dropped since. By the proof of `Admission`, a group that begins has an index below
U + D + (S + 1) * B + E. Without dropped groups, step k + 1 so trains rows that are drawn with the pools after step k - S. Each batch file has
the rows that were drawn before it, and the pass rates that it adds.

Where a batch is composed again, finished groups beyond those rows have trained rows that no file names. They add no pass rate.
"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from hpcrl.config.sections.data import CurriculumConfig
from hpcrl.controller.prompt_stream import PromptStream, group_index
from hpcrl.controller.schedule import Schedule
from hpcrl.errors import DataError
from hpcrl.observe.scores import is_solved
from hpcrl.types import Batch, Drawn, GroupMeta

Pool = Literal["easy", "trainable", "hard", "unseen"]
POOLS: tuple[Pool, ...] = "easy", "trainable", "hard", "unseen"

_UNSEEN = -1.0
_ONE = 1 << 32  # shares are whole numbers of 1 / _ONE: sums of floats would drift over passes


class PassRates:
    """Pass rates of the rows of a dataset, 8 bytes for each, and the pools that they are in."""

    def __init__(self, config: CurriculumConfig, n_rows: int) -> None:
        self._config, self._rates = config, array("d", [_UNSEEN]) * n_rows
        self._counts: dict[Pool, int] = {**dict.fromkeys(POOLS, 0), "unseen": n_rows}

    def __len__(self) -> int:
        return len(self._rates)

    @property
    def counts(self) -> dict[Pool, int]:
        """How many rows each pool has."""
        return dict(self._counts)

    def pool(self, row: int) -> Pool:
        """Return the pool of a row."""
        rate = self._rates[row]
        if rate == _UNSEEN:
            return "unseen"
        return "easy" if rate >= self._config.easy_from else "hard" if rate <= self._config.hard_to else "trainable"

    def observe(self, row: int, rate: float) -> None:
        """Take in the pass rate of a group of a row, which may move that to another pool."""
        before, known, newest = self.pool(row), self._rates[row], self._config.newest
        self._rates[row] = rate if known == _UNSEEN else known + newest * (rate - known)
        self._counts[before] -= 1
        self._counts[self.pool(row)] += 1


class Curriculum:
    """The rows that groups train, and the pass rates from which they follow.

    Args:
        seed: decides in which of the passes a row is left out.
        row_at, pass_of: return the row of a visit, and the pass through the dataset that it belongs to; visits are counted from 0.
        n_rows: of the dataset.
        batch_size: groups per step, B.
        ahead: groups that may be begun beyond those of composed batches, (S + 1) * B + E.
        success_reward: generator.success_reward.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        seed: int,
        row_at: Callable[[int], int],
        pass_of: Callable[[int], int],
        n_rows: int,
        ahead: int,
        success_reward: float,
    ) -> None:
        self._row_at, self._pass_of, self._ahead, self._success_reward = row_at, pass_of, ahead, success_reward
        self._rates = PassRates(config, n_rows)
        shares: dict[Pool, float] = {"easy": config.easy, "hard": config.hard}
        self._shares = {pool: round(share * _ONE) for pool, share in shares.items() if share < 1}
        self._salt = random.Random(f"curriculum-{seed}").getrandbits(32)
        self._rows = dict[int, int]()  # of the groups that no batch has used; ~row where the pass rate is disregarded
        self._first: int | None = None
        self._end = self._visit = self._used = 0

    def begin(self, index: int) -> None:
        """Begin with group `index`, where no batch of this run has drawn rows: all groups before count as used."""
        if self._first is None:
            self._first = self._end = self._visit = self._used = index

    def row(self, index: int) -> int:
        """Return the row that a group trains which no batch has used yet."""
        self._draw(index + 1)
        row = self._rows[index]
        return (row if row >= 0 else ~row) % len(self._rates)  # an attempt may find fewer rows than the one that drew

    def disregard(self, finished: Collection[int]) -> None:
        """Disregard the pass rates of finished groups whose rows no batch has: of those that drew them, one is composed again."""
        for index in sorted(index for index in finished if index >= self._end):
            self._draw(index + 1)
            self._rows[index] = ~self._rows[index]  # also for later attempts, which read it in the next batch

    def compose(self, batch: Batch, finished: Sequence[GroupMeta], cursor: int) -> Batch:
        """Return the next batch with the rows that are drawn before it, and the pass rates that it adds.

        Args:
            finished: groups that were generated for it, dropped ones too.
            cursor: index of the first group that has not begun.
        """
        assert self._first is not None
        # beyond the bound are only groups that an attempt with other settings has begun
        after = max(self._used + len(batch.dropped) + self._ahead, cursor)
        self._draw(after)
        passed = [(self.row(index), rate) for index, rate in self._passed(finished) if self._rows[index] >= 0]
        rows = [self._rows[index] for index in range(self._first, self._end)]
        return replace(batch, drawn=Drawn(self._first, rows, self._visit, passed, self._metrics(passed)))

    def fold(self, batch: Batch) -> None:
        """Add a batch that is written, by this attempt or an earlier one.

        Raises:
            DataError: it was composed without a curriculum.
        """
        if (drawn := batch.drawn) is None:
            raise DataError(
                f"the batch of step {batch.step} has no rows that a curriculum drew; set data.curriculum as it was"
            )
        self.begin(drawn.first)
        self._rows.update(enumerate(drawn.rows, drawn.first))
        self._first = self._end = drawn.first + len(drawn.rows)
        self._visit = drawn.visit
        for name in batch.generated:
            if (index := group_index(name)) is not None:
                self._rows.pop(index, None)
        self._used += len(batch.generated)
        for row, rate in drawn.passed:
            if row < len(self._rates):
                self._rates.observe(row, rate)

    def _draw(self, end: int) -> None:
        while self._end < end:
            row = self._row_at(self._visit)
            if self._is_trained(row, self._pass_of(self._visit)):
                self._rows[self._end] = row
                self._end += 1
            self._visit += 1

    def _is_trained(self, row: int, number: int) -> bool:
        """Return whether a pass trains a row: shares of the passes add up, and each whole one is a visit that is trained."""
        share = self._shares.get(self._rates.pool(row))
        if share is None:
            return True
        phase = (row * 2654435761 + self._salt) % _ONE  # rows of a pool take turns
        return (phase + (number + 1) * share) // _ONE > (phase + number * share) // _ONE

    def _passed(self, finished: Sequence[GroupMeta]) -> list[tuple[int, float]]:
        """Return the indices and the pass rates of groups with samples that are scored."""
        found = dict[int, float]()
        for group in finished:
            scored, index = group.scored_samples, group_index(group.group_id)
            if scored and index is not None:
                solved = (is_solved(one.reward, one.env_metrics, self._success_reward) for one in scored)
                found[index] = fmean(solved)
        return sorted(found.items())

    def _metrics(self, passed: Sequence[tuple[int, float]]) -> dict[str, float]:
        rates = defaultdict[Pool, list[float]](list)
        for row, rate in passed:
            rates[self._rates.pool(row)].append(rate)
        return {
            "curriculum/passes": self._pass_of(self._visit),
            **{f"curriculum/rows_{pool}": count / len(self._rates) for pool, count in self._rates.counts.items()},
            **{f"curriculum/groups_{pool}": len(rates[pool]) / max(1, len(passed)) for pool in POOLS},
            **{f"curriculum/pass_rate_{pool}": fmean(own) for pool, own in rates.items() if own},
        }


def curriculum_of(
    schedule: Schedule, stream: PromptStream, row_at: Callable[[int], int], n_rows: int
) -> Curriculum | None:
    """Return the curriculum of a run that has no batches yet; None where each pass trains all rows.

    Args:
        row_at, n_rows: as of `Curriculum`.
    """
    if not schedule.curriculum.is_on:
        return None
    ahead, seed = (schedule.staleness + 1) * schedule.batch_size + schedule.surplus, schedule.order_seed or 0
    return Curriculum(schedule.curriculum, seed, row_at, stream.epoch, n_rows, ahead, schedule.success_reward)
