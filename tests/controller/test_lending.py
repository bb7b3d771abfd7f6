"""Which leases of the trainer's GPUs pay, under a virtual clock: against the time of the same wait without them, for drawn costs and speeds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from hpcrl.controller.lending import LeaseTimes, RunningMedian, StepTrial


@dataclass(frozen=True)
class Times:
    """Costs of one lease, in seconds."""

    offload: float
    wake: float
    sleep: float
    onload: float


def names_of(own: int, lent: int) -> list[str]:
    return [f"rollout-{own + number}" for number in range(lent)]


def measured(times: Times, lent: int, own: int, rate: float) -> LeaseTimes:
    """Return the lending of a run whose costs, and whose groups per second of all own replicas, are known from earlier waits."""
    names = names_of(own, lent)
    lending, now = LeaseTimes(names), 0.0
    for _ in range(4):  # steps without leases
        now += 1e6
        lending.trainer_trains(now)
    for step in range(3):
        lending.trainer_waits(now, away=False, onload=times.onload if step else 0.0)
        lending.trainer_leaves(now)
        lending.trainer_waits(now + times.offload, away=True)
        for name in names:
            lending.asleep(name, now, starts=step == 0)
            lending.granted(name, now)
            lending.awake(name, now + times.wake)
        for _ in range(1000):
            lending.finished("rollout-0")
        lending.finished(names[0])
        now += 1000 / rate
        lending.batch_complete(now)
        for name in names:
            lending.ordered(name, now)
            lending.asleep(name, now + times.sleep)
        lending.trainer_trains(now)
        now += times.sleep + times.onload + 5.0
    lending.trainer_waits(now, away=False, onload=times.onload)
    return lending


def wait(times: Times, missing: float, own_rate: float, lent_rate: float) -> float:
    """Return the seconds until the trainer has its batch on its GPUs, where engines have them meanwhile. Engines are slow as fluids are."""
    begin = times.offload + times.wake
    if own_rate * begin >= missing:  # complete before they are awake
        return begin + times.sleep + times.onload
    return begin + (missing - own_rate * begin) / (own_rate + lent_rate) + times.sleep + times.onload


@pytest.mark.parametrize("seed", range(10))
def test_a_lease_pays_exactly_where_the_trainer_waits_less(seed: int) -> None:
    draw = random.Random(seed)
    answers = {assert_pays_where_it_is_faster(draw) for _ in range(50)}
    assert answers == {True, False}


def assert_pays_where_it_is_faster(draw: random.Random) -> bool:
    times = Times(*(draw.uniform(0.1, 20.0) for _ in range(4)))
    own, lent, rate, missing = draw.randint(1, 8), draw.randint(1, 8), draw.uniform(0.05, 2.0), draw.randint(1, 200)
    lending = measured(times, lent, own, rate)
    pays = {lending.pays(name, missing=missing, replicas=own, steps=1) for name in names_of(own, lent)}
    with_lease, without = wait(times, missing, rate, rate * lent / own), missing / rate
    assert pays == {with_lease < without - 1e-9}, (with_lease, without)
    return with_lease < without


def test_nothing_is_lent_before_a_wait_was_measured() -> None:
    lending = LeaseTimes(["rollout-1"])
    lending.trainer_waits(0.0, away=False)
    assert not lending.pays("rollout-1", missing=1000, replicas=1, steps=1)
    lending.batch_complete(60.0)
    assert not lending.pays("rollout-1", missing=1000, replicas=1, steps=1), (
        "no other replica has finished a group meanwhile"
    )
    lending.trainer_trains(70.0)
    for step in range(3):
        assert not lending.lends
        lending.trainer_trains(80.0 + step)
    lending.trainer_waits(100.0, away=False)
    lending.finished("rollout-0")
    lending.finished("rollout-1")
    lending.finished(None)
    lending.batch_complete(110.0)
    assert lending.pays("rollout-1", missing=1, replicas=1, steps=1), "what was never measured counts as nothing"


def test_a_start_is_measured_for_itself() -> None:
    """An engine that died is started again only where the wait is long enough for that."""
    lending = measured(Times(1.0, 1.0, 1.0, 1.0), lent=1, own=1, rate=1.0)
    name = "rollout-1"
    assert lending.pays(name, missing=10, replicas=1, steps=1)
    lending.asleep(name, 1e6, starts=True)
    lending.granted(name, 1e6)
    lending.awake(name, 1e6 + 99.0)
    lending.asleep(name, 1e6 + 100.0, starts=True)
    assert not lending.pays(name, missing=40, replicas=1, steps=1)
    assert lending.pays(name, missing=60, replicas=1, steps=1)
    lending.asleep(name, 1e6 + 101.0)
    assert lending.pays(name, missing=10, replicas=1, steps=1)


def test_what_the_trainer_has_spent_already_does_not_count() -> None:
    lending = measured(Times(50.0, 1.0, 1.0, 1.0), lent=1, own=1, rate=1.0)
    name = "rollout-1"
    assert not lending.pays(name, missing=30, replicas=1, steps=1)
    lending.trainer_waits(1e6, away=True)
    assert lending.pays(name, missing=30, replicas=1, steps=1)


def test_engines_that_have_the_lease_and_have_not_asked_yet_are_counted() -> None:
    lending = LeaseTimes(["rollout-1", "rollout-2"])
    for name in ("rollout-1", "rollout-2"):
        lending.granted(name, 1.0)
    assert (lending.waking, lending.leases) == (2, 2)
    lending.awake("rollout-1", 2.0)
    lending.asleep("rollout-2", 3.0, starts=True)
    assert (lending.waking, lending.leases) == (0, 2)


def test_one_slow_measurement_among_many_changes_nothing() -> None:
    middle = RunningMedian()
    assert (middle.value, middle.seconds) == (None, 0.0)
    for value in (2.0, 900.0, 1.0, 2.0, 3.0):
        middle.add(value)
    assert middle.value == 2.0
    for _ in range(9):
        middle.add(7.0)
    assert middle.value == 7.0


def steps(trial: StepTrial, seconds: float, *, lent: bool, count: int = 1) -> None:
    for _ in range(count):
        trial.add(seconds, lent=lent)


def test_steps_without_leases_come_first() -> None:
    trial = StepTrial()
    steps(trial, 10.0, lent=False, count=2)
    assert not trial.lends
    steps(trial, 10.0, lent=False)
    assert trial.lends
    steps(trial, 90.0, lent=True, count=2)
    assert trial.lends, "the first ones start engines"
    steps(trial, 8.0, lent=True, count=4)
    assert trial.lends


def test_leases_end_where_steps_are_no_shorter_and_are_tried_again() -> None:
    trial = StepTrial()
    steps(trial, 10.0, lent=False, count=3)
    steps(trial, 11.0, lent=True, count=5)
    assert not trial.lends
    steps(trial, 10.0, lent=False, count=21)
    assert not trial.lends
    steps(trial, 10.0, lent=False)
    assert trial.lends
    steps(trial, 7.0, lent=True, count=7)
    assert trial.lends


def test_a_run_that_has_become_slower_keeps_its_leases() -> None:
    trial = StepTrial()
    steps(trial, 10.0, lent=False, count=3)
    steps(trial, 8.0, lent=True, count=7)
    steps(trial, 12.0, lent=True, count=4)
    assert not trial.lends, "longer than the old ones without"
    steps(trial, 15.0, lent=False, count=3)
    assert trial.lends
