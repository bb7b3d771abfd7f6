"""The limit of groups in flight against an engine with a cache of a certain size."""

from __future__ import annotations

import pytest

from hpcrl.rollout.limiter import ConcurrencyLimiter, Load


class Engine:
    """Groups need `each` of the cache, whose size is 1; what does not fit is preempted, and a tenth of the groups ends per look."""

    def __init__(self, each: float) -> None:
        self.each, self.running, self.preemptions = each, 0, 0.0

    def look(self, limiter: ConcurrencyLimiter) -> None:
        self.running -= max(1, self.running // 10) if self.running else 0
        self.running = max(self.running, limiter.limit)
        need = self.running * self.each
        self.preemptions += need > 1.0
        limiter.update(Load(min(1.0, need), 0.0, self.preemptions), self.running)


@pytest.mark.parametrize("fits", [1, 7, 30])
def test_as_many_groups_as_the_cache_holds(fits: int) -> None:
    limiter, engine = ConcurrencyLimiter(64), Engine(1 / fits)
    limits = []
    for _ in range(300):
        engine.look(limiter)
        limits.append(limiter.limit)
    assert all(max(1, 0.6 * fits) <= limit <= fits + 1 for limit in limits[100:])


def test_room_comes_back_when_samples_get_shorter() -> None:
    limiter, engine = ConcurrencyLimiter(64), Engine(1 / 8)
    for _ in range(100):
        engine.look(limiter)
    engine.each = 1 / 200
    for _ in range(100):
        engine.look(limiter)
    assert limiter.limit == 64


def test_a_limit_is_lowered_once_until_what_runs_has_come_down_to_it() -> None:
    limiter = ConcurrencyLimiter(20)
    for preemptions in range(5):
        limiter.update(Load(1.0, 0.0, preemptions), 20)
    assert limiter.limit == 16
    limiter.update(Load(1.0, 0.0, 9), 16)
    assert limiter.limit == 12


def test_requests_that_wait_press_only_where_the_cache_is_full() -> None:
    limiter = ConcurrencyLimiter(10)
    limiter.update(Load(0.2, 3.0, 0.0), 10)
    assert limiter.limit == 10, "they have just arrived"
    limiter.update(Load(0.99, 3.0, 0.0), 10)
    assert limiter.limit == 8


def test_there_is_more_room_only_where_there_was_too_little() -> None:
    limiter = ConcurrencyLimiter(4)
    assert not limiter.update(Load(0.1, 0.0, 7.0), 4), "preemptions of before are none of now"
    limiter.update(Load(1.0, 0.0, 8.0), 4)
    assert limiter.limit == 3
    assert not limiter.update(Load(0.1, 0.0, 8.0), 2), "not all of it is used"
    assert limiter.update(Load(0.1, 0.0, 8.0), 3)
    assert limiter.limit == 4
    assert not limiter.update(Load(0.1, 0.0, 8.0), 4)


def test_one_group_is_always_tried() -> None:
    limiter = ConcurrencyLimiter(2)
    for preemptions in range(9):
        limiter.update(Load(1.0, 5.0, preemptions), 1)
    assert limiter.limit == 1


def test_what_an_update_preempts_is_no_pressure() -> None:
    limiter = ConcurrencyLimiter(20)
    limiter.update(Load(0.5, 0.0, 3.0), 20)
    for preemptions in (3, 8, 8, 13):  # each is counted when it goes on
        limiter.update(Load(0.5, 0.0, preemptions, updates=1, dropped=10), 20)
    assert limiter.limit == 20
    limiter.update(Load(1.0, 0.0, 14, updates=1, dropped=10), 20)
    assert limiter.limit == 16, "an eleventh is one too many"
    limiter.update(Load(1.0, 0.0, 15, updates=2, dropped=5), 16)
    assert limiter.limit == 16
    limiter.update(Load(1.0, 0.0, 25, updates=3, dropped=5), 16)
    assert limiter.limit == 12, "what an earlier update might have preempted is forgotten"


def test_groups_begin_as_soon_as_there_is_room_or_in_waves() -> None:
    at_once, waves = ConcurrencyLimiter(4), ConcurrencyLimiter(4, waves=True)
    assert [at_once.room(running) for running in (0, 1, 4, 5)] == [4, 3, 0, 0]
    assert [waves.room(running) for running in (0, 1, 4, 5)] == [4, 0, 0, 0]
