"""Which rows come more seldom, that none starves, and that a run which is interrupted draws what another one does."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.config.sections.algorithm import DynamicSamplingConfig
from hpcrl.config.sections.data import CurriculumConfig
from hpcrl.controller.curriculum import POOLS, Curriculum, PassRates, curriculum_of
from hpcrl.controller.dataset_rows import Mixture
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.prompt_stream import PromptStream, group_id, group_index
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.service import Service
from hpcrl.data.batch_file import read_batch
from hpcrl.errors import DataError
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from hpcrl.types import Batch, Drawn, GroupMeta, SampleMeta, Work
from tests.controller.simulation.play import Play, Scene
from tests.controller.test_api import finish, make_run, prompts, write
from tests.controller.test_service import SCHEDULE

SELDOM = CurriculumConfig(easy=0.25, hard=0.4)
EASY, HARD = range(4), range(4, 8)
"""Rows of twelve that are always solved, and that never are; of the others half of the samples are."""


def group(name: str, version: int, rewards: list[float], reason: str = "stop") -> GroupMeta:
    samples = [SampleMeta(reward, (2,), 1, reason, {}, reward) for reward in rewards]
    return GroupMeta(name, "train", 0, "", samples, version, version, "s", 1.0)


def rewards_of(row: int) -> list[float]:
    return [1.0, 1.0] if row in EASY else [0.0, 0.0] if row in HARD else [0.0, 1.0]


def curriculum(schedule: Schedule, n_rows: int = 12) -> Curriculum:
    stream = PromptStream(n_rows, schedule.batch_size, schedule.seed, schedule.order_seed, schedule.drop_last)
    made = curriculum_of(schedule, stream, stream.row, n_rows)
    assert made is not None
    return made


def test_a_row_changes_its_pool_with_its_pass_rate() -> None:
    rates = PassRates(CurriculumConfig(easy=0.5, easy_from=0.9, hard_to=0.05, newest=0.5), 3)
    assert rates.counts == {"easy": 0, "trainable": 0, "hard": 0, "unseen": 3}
    rates.observe(0, 1.0)
    assert rates.pool(0) == "easy"
    rates.observe(0, 0.5)  # (1 + 0.5) / 2
    assert rates.pool(0) == "trainable"
    rates.observe(1, 0.0)
    assert rates.pool(1) == "hard"
    rates.observe(1, 0.125)
    assert rates.pool(1) == "trainable", "one of eight samples is solved"
    assert rates.counts == {"easy": 0, "trainable": 2, "hard": 0, "unseen": 1}
    for _ in range(3):
        rates.observe(0, 1.0)
    assert rates.pool(0) == "easy"


@settings(max_examples=30, deadline=None)
@given(
    easy=st.floats(0.01, 1),
    hard=st.floats(0.01, 1),
    n_rows=st.integers(1, 30),
    order=st.none() | st.integers(0, 99),
    seed=st.integers(0, 99),
)
def test_no_row_starves_and_shares_are_kept(
    easy: float, hard: float, n_rows: int, order: int | None, seed: int
) -> None:
    """Pass rates are what they are: a row of the share c is trained in one of ceil(1 / c) passes at least, and in c of them."""
    chance = random.Random(seed)
    solved = [chance.choice([0.0, 0.5, 1.0]) for _ in range(n_rows)]
    config = CurriculumConfig(easy=min(easy, 0.999), hard=hard)
    stream = PromptStream(n_rows, n_rows, 1, order)
    one = Curriculum(config, seed, stream.row, stream.epoch, n_rows, n_rows, 1.0)
    one.begin(0)
    trained, step, passes = defaultdict[int, list[int]](list), 0, 0.0
    while len(trained) < n_rows or step < 120:
        names = [group_id(index) for index in range(step * n_rows, (step + 1) * n_rows)]
        rows = [one.row(index) for index in range(step * n_rows, (step + 1) * n_rows)]
        rewards = [[1.0] if solved[row] == 1 else [0.0, 1.0] if solved[row] else [0.0] for row in rows]
        done = [group(name, step, own) for name, own in zip(names, rewards, strict=True)]
        step += 1
        batch = one.compose(Batch(step, done, step * n_rows), done, step * n_rows)
        assert batch.drawn
        for row in rows:
            trained[row].append(step)
        one.fold(batch)
        passes = batch.drawn.metrics["curriculum/passes"]
    for row, rate in enumerate(solved):
        share = config.easy if rate == 1 else config.hard if rate == 0 else 1.0
        # the first one or two passes find it unseen; what is drawn and not trained yet is not counted
        assert abs(len(trained[row]) - share * passes) <= 6


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0.01, 0.99), seed=st.integers(0, 9), row=st.integers(0, 99), first=st.integers(0, 10**6))
def test_a_row_is_trained_in_one_of_so_many_passes(share: float, seed: int, row: int, first: int) -> None:
    one = Curriculum(CurriculumConfig(easy=share), seed, int, int, 100, 1, 1.0)
    one._rates.observe(row, 1.0)
    apart = math.ceil(1 / share) + 1  # shares are rounded to 2^-32
    passes = [one._is_trained(row, number) for number in range(first, first + 5 * apart)]
    assert abs(sum(passes) - share * len(passes)) <= 2
    assert all(any(passes[at : at + apart]) for at in range(len(passes) - apart))


class Learned(Play):
    """A run under a virtual clock, with replicas that fail, whose groups have rows of a curriculum."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        schedule = replace(
            SCHEDULE, batch_size=scene.batch_size, staleness=scene.bound, surplus=scene.surplus, curriculum=SELDOM
        )
        self.one, self.again = curriculum(schedule), curriculum(schedule)
        self.one.begin(0)
        self.rows = dict[int, int]()

    def _begin(self, replica: Any, assignment: Any) -> None:
        for index in assignment.indices:
            assert self.rows.setdefault(index, self.one.row(index)) == self.one.row(index), "on every worker"
        super()._begin(replica, assignment)

    def _next_batch(self) -> Batch | None:
        if (batch := super()._next_batch()) is None:
            return None
        whole = self.one.compose(batch, self._composer.finished, self.admission.cursor)
        assert whole.drawn
        assert whole.drawn.first + len(whole.drawn.rows) >= self.admission.cursor
        assert self.one._used + len(batch.dropped) + self.one._ahead >= self.admission.cursor, "the bound holds"
        read = Batch.from_json(json.loads(json.dumps(whole.to_json())))
        assert sorted(row for row, _ in whole.drawn.passed) == sorted(
            self.rows[index] for name in batch.generated - {*batch.given_up} if (index := group_index(name)) is not None
        )
        self.one.fold(whole)
        self.again.fold(read)
        # what an attempt that begins now knows is what this one does
        for name in ("_rows", "_first", "_end", "_visit", "_used"):
            assert getattr(self.again, name) == getattr(self.one, name), name
        assert self.again._rates._rates == self.one._rates._rates
        return whole


@settings(max_examples=15, deadline=None)
@given(
    st.builds(
        Scene,
        replicas=st.integers(1, 5),
        capacity=st.integers(1, 4),
        steps=st.integers(1, 10),
        batch_size=st.integers(1, 7),
        bound=st.integers(0, 3),
        surplus=st.integers(0, 3),
        dropped=st.sampled_from([0.0, 0.5]),
        lifetime_s=st.sampled_from([100.0, 1e9]),
        seed=st.integers(0, 1000),
    )
)
def test_a_group_has_its_row_whoever_begins_it_and_a_restart_knows_it(scene: Scene) -> None:
    one = Learned(scene)
    one.run()
    assert len(one.one._rows) <= (scene.bound + 2) * scene.batch_size + scene.surplus + one.dropped, "bounded"


def finished(run: Run, work: Work, version: int) -> GroupMeta:
    """Write a group whose rewards are those of its row."""
    row = int(work.prompt.uid[1:])
    meta = finish(run, work, version)
    return write(
        run,
        replace(meta, samples=[replace(one, reward=r) for one, r in zip(meta.samples, rewards_of(row), strict=True)]),
    )


class Trained:
    """A run whose attempts are killed; who generates, and how much before a batch is asked for, is drawn."""

    def __init__(self, path: Path, workers: int, seed: int, **changes: Any) -> None:
        self.run, self.workers, self.chance, self.attempt = make_run(path), workers, random.Random(seed), 0
        self.schedule = replace(SCHEDULE, total_steps=12, eval_interval=0, curriculum=SELDOM, **changes)
        self.asked = dict[str, str]()

    def service(self) -> Service:
        self.attempt += 1
        mixture = Mixture((4, 8), (1.0, 1.0), 7)
        return Service(self.run, self.attempt, self.schedule, prompts(12), [], mixture=mixture)

    def start(self, step: int) -> Service:
        one = self.service()
        one.start(step)
        return one

    def train(self, one: Service, first: int, last: int) -> None:
        for step in range(first, last + 1):
            while one.batch(step) is None:
                worker = f"rollout-{self.chance.randrange(self.workers)}"
                one.seen(worker, step - 1, "ready")
                work = one.claim(worker, step - 1, self.chance.randint(1, 3))
                for item in work:
                    uid = item.prompt.uid
                    assert self.asked.setdefault(item.group_id, uid) == uid, "the same row after a restart"
                done = self.chance.sample(work, self.chance.randint(0, len(work)))
                assert one.complete([finished(self.run, item, step - 1) for item in done]) == {}
                one.leave(worker)
            one.published(step)

    def batches(self) -> list[tuple[Drawn, list[str]]]:
        files = [read_batch(self.run.batch(step)) for step in range(1, self.schedule.total_steps + 1)]
        return [
            (file.batch.drawn, [one.group_id for one in file.batch.groups])
            for file in files
            if file and file.batch.drawn
        ]


@pytest.mark.parametrize("sampling", [None, "filter"])
def test_a_run_that_is_killed_and_has_more_workers_draws_the_same_rows(tmp_path: Path, sampling: Any) -> None:
    """Also with groups that dynamic sampling drops: their pass rates count."""
    changes = {"sampling": DynamicSampling(DynamicSamplingConfig(type=sampling, max_sample_batches=0)), "staleness": 0}
    whole = Trained(tmp_path / "whole" / "run", 1, 1, **changes)
    whole.train(whole.start(0), 1, 12)
    cut = Trained(tmp_path / "cut" / "run", 3, 2, **changes)
    at = 0
    while at < 12:  # each attempt gets a few steps further, and the next one begins some steps before
        one, upto = cut.start(at), min(12, at + cut.chance.randint(2, 4))
        cut.train(one, at + 1, upto)
        at = upto - (upto < 12)
    assert cut.attempt > 3
    assert cut.asked == whole.asked
    assert cut.batches() == whole.batches()
    pools = merged(whole.run)[12]
    assert sum(pools[f"curriculum/rows_{pool}"] for pool in POOLS) == pytest.approx(1)
    assert sum(pools[f"curriculum/groups_{pool}"] for pool in POOLS) == pytest.approx(1)
    assert pools["curriculum/rows_unseen"] == 0
    assert pools["curriculum/pass_rate_trainable"] == 0.5
    often = Counter(row for drawn, _ in whole.batches() for row, _ in drawn.passed)
    assert set(often) == set(range(12)), "none starves"
    assert min(often[row] for row in range(8, 12)) > max(often[row] for row in EASY)


def test_rows_of_a_stale_run_stay_over_kills(tmp_path: Path) -> None:
    run = Trained(tmp_path / "stale" / "run", 3, 5, staleness=2, surplus=1)
    at = 0
    while at < 12:
        one, upto = run.start(at), min(12, at + run.chance.randint(1, 3))
        run.train(one, at + 1, upto)
        at = upto - (upto < 12)
    for drawn, _ in run.batches():
        for index, row in enumerate(drawn.rows, drawn.first):
            assert run.asked.get(group_id(index), f"p{row}") == f"p{row}"
    trained = [name for _, names in run.batches() for name in names]
    assert len(trained) == len(set(trained)) == 24


def test_a_batch_that_is_composed_again_credits_no_other_row(tmp_path: Path) -> None:
    """Groups were dropped, and others begun in their place: their rows were drawn with pools that the next attempt does not know."""
    sampling = DynamicSampling(DynamicSamplingConfig(type="filter", max_sample_batches=0))
    run = Trained(tmp_path / "again" / "run", 2, 0, staleness=3, sampling=sampling)
    one = run.start(0)
    run.train(one, 1, 2)
    while work := one.claim("rollout-0", 2, 2):  # batches ahead of training, as far as staleness allows
        assert one.complete([finished(run.run, item, 2) for item in work]) == {}
    file = read_batch(run.run.batch(3))
    assert file
    (run.run.path / file.batch.groups[0].path).unlink()
    run.asked.clear()
    run.service().history(2)  # of an attempt that is killed before it composes one
    run.train(run.start(2), 3, 4)
    run.train(run.start(3), 4, 12)  # what the attempt before disregarded, this one does too
    credited = [one for drawn, _ in run.batches() for one in drawn.passed]
    assert len(credited) > 24
    assert [rate for _, rate in credited] == [fmean(rewards_of(row)) for row, _ in credited]


def test_failed_samples_have_no_pass_rate() -> None:
    one = curriculum(replace(SCHEDULE, curriculum=SELDOM))
    one.begin(0)
    done = [group(group_id(0), 0, [0.0, 0.0], "failed"), group(group_id(1), 0, [0.0, 1.0])]
    drawn = one.compose(Batch(1, done, 2), done, 2).drawn
    assert drawn
    assert drawn.passed == [(one.row(1), 0.5)]


def test_a_dataset_that_has_lost_rows_goes_on() -> None:
    """As the order of prompts does: `hpcrl resume` accepts changed files."""
    schedule = replace(SCHEDULE, curriculum=SELDOM, staleness=2)
    before, after = curriculum(schedule), curriculum(schedule, 3)
    before.begin(0)
    done = [group(group_id(index), 0, [1.0]) for index in range(2)]
    after.fold(before.compose(Batch(1, done, 2), done, 2))
    assert {after.row(index) for index in range(2, 20)} == {0, 1, 2}


def test_batches_without_drawn_rows_are_refused() -> None:
    with pytest.raises(DataError, match=r"step 1 has no rows that a curriculum drew; set data\.curriculum as it was"):
        curriculum(replace(SCHEDULE, curriculum=SELDOM)).fold(Batch(1, [], 0))


def test_a_million_rows_take_little_memory_and_time() -> None:
    one = Curriculum(SELDOM, 1, lambda visit: visit % 1_000_000, lambda visit: visit // 1_000_000, 1_000_000, 1024, 1.0)
    one.begin(0)
    assert one._rates._rates.itemsize * len(one._rates) == 8_000_000
    for step in range(3):
        done = [group(group_id(index), step, [1.0]) for index in range(step * 512, (step + 1) * 512)]
        assert [one.row(index) for index in range(step * 512, (step + 1) * 512)]
        one.fold(one.compose(Batch(step + 1, done, (step + 1) * 512), done, (step + 1) * 512))
        assert len(one._rows) <= 1024
