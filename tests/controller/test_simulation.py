"""Whole runs under a virtual clock (tests/controller/simulation): the bound holds, no group is lost or doubled, none stands still, few idle."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.controller.simulation.lent import ASLEEP, AWAKE, LeaseScene, LentPlay
from tests.controller.simulation.play import Play, Scene
from tests.controller.simulation.scored import ScoredPlay, ScoreScene


def play(scene: Scene) -> Play:
    one = Play(scene)
    one.run()
    return one


@pytest.mark.parametrize("bound", range(5))
def test_a_run_with_failures_and_joins(bound: int) -> None:
    one = play(Scene(replicas=100, batch_size=200, steps=15, bound=bound, lifetime_s=2000.0, seed=bound))
    assert all(one.counts[what] for what in ("vanished", "silent", "taken back"))
    assert one.counts["late accepted"] + one.counts["late refused"]
    assert one.dropped
    assert one.given_up == 0
    assert one.idle_share < 0.01


def test_surplus_groups_keep_stragglers_from_holding_a_batch() -> None:
    """One group in a hundred takes twenty times as long; without staleness each step waits for one."""
    calm: dict[str, Any] = {
        "replicas": 50,
        "batch_size": 200,
        "steps": 10,
        "dropped": 0.0,
        "late": 0.0,
        "lifetime_s": 1e9,
    }
    plain, ahead = play(Scene(bound=0, **calm)), play(Scene(bound=0, surplus=40, **calm))
    assert ahead.now < 0.5 * plain.now
    assert 0 < ahead.given_up <= 40 * 10


def test_surplus_groups_train_later_where_staleness_allows() -> None:
    calm: dict[str, Any] = {
        "replicas": 50,
        "batch_size": 200,
        "steps": 20,
        "dropped": 0.0,
        "late": 0.0,
        "lifetime_s": 1e9,
    }
    none, some = (play(Scene(bound=bound, surplus=40, longest_s=40.0, **calm)) for bound in (0, 4))
    assert none.given_up > 20 * 20
    assert some.given_up == 40, "what is left when the run ends"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Scene,
        replicas=st.integers(1, 6),
        capacity=st.integers(1, 5),
        steps=st.integers(1, 12),
        batch_size=st.integers(1, 7),
        bound=st.integers(2, 4),
        surplus=st.integers(0, 4),
        interval=st.integers(1, 3),
        dropped=st.sampled_from([0.0, 0.5]),
        late=st.sampled_from([0.0, 0.5]),
        train_s=st.sampled_from([0.1, 100.0]),
        lifetime_s=st.sampled_from([100.0, 1e9]),
        seed=st.integers(0, 1000),
    )
)
def test_any_run_comes_to_its_end_within_the_bounds(scene: Scene) -> None:
    play(scene)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1), st.integers(1, 5), st.integers(0, 3), st.integers(0, 1000))
def test_any_run_close_to_on_policy(bound: int, replicas: int, surplus: int, seed: int) -> None:
    scene = Scene(
        replicas=replicas, capacity=2, steps=8, batch_size=4, bound=bound, surplus=surplus, lifetime_s=150.0, seed=seed
    )
    one = play(scene)
    assert surplus or not one.given_up


@pytest.mark.parametrize(("bound", "surplus"), [(0, 0), (1, 20), (4, 0)])
def test_scorers_that_die_hold_batches_back_and_lose_none(bound: int, surplus: int) -> None:
    """A reward model decides what is dropped, and batches wait for a teacher too; both have copies that die and hand over late."""
    scene = Scene(replicas=100, batch_size=200, steps=15, bound=bound, surplus=surplus, lifetime_s=2000.0, seed=bound)
    one = ScoredPlay(scene, ScoreScene(scorers=5, dies=0.1))
    one.run()
    assert one.deaths > 30
    assert one.unwanted, "late scores"
    assert one.dropped
    assert 2 * one.trained <= one.scored <= 2 * one.admission.cursor
    assert surplus or one.given_up == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(0, 1000))
def test_any_scored_run_comes_to_its_end(bound: int, replicas: int, surplus: int, scorers: int, seed: int) -> None:
    scene = Scene(
        replicas=replicas, capacity=3, steps=8, batch_size=4, bound=bound, surplus=surplus, lifetime_s=150.0, seed=seed
    )
    one = ScoredPlay(scene, ScoreScene(scorers, samples=4, score_s=20.0, dies=0.3))
    one.run()
    assert surplus or not one.given_up


@pytest.mark.slow
def test_a_million_groups_and_a_thousand_replicas_in_a_minute() -> None:
    began = time.process_time()
    one = play(Scene(replicas=1000, batch_size=2000, steps=500))
    assert time.process_time() - began < 60
    assert one.admission.cursor > 1_000_000
    assert one.idle_share < 0.01


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_evaluations_beside_training_cost_no_idle_replicas(bound: int) -> None:
    """Each second step; also of versions that lost replicas had."""
    calm = Scene(
        replicas=40, batch_size=80, steps=12, bound=bound, rows=160, longest_s=120.0, lifetime_s=2000.0, seed=bound
    )
    one = play(replace(calm, evaluate=2))
    assert one.evaluated == 6
    assert one.idle_share < 0.01
    assert one.now < 1.5 * play(calm).now, "rows are as much work as groups are, each second step"


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_leases_where_engines_die_in_each_state(bound: int) -> None:
    scene = Scene(replicas=10, capacity=2, batch_size=60, steps=40, bound=bound, longest_s=120.0, lifetime_s=600.0)
    one = LentPlay(scene, LeaseScene(lent=6))
    one.run()
    assert one.leases["given"] > 50
    assert one.leases[ASLEEP]
    assert one.leases[AWAKE]


def test_leases_make_steps_shorter_where_groups_wait_for_engines() -> None:
    """A third more engines for most of the time: at best 1.5 times as fast, without what leases cost."""
    calm = {
        "replicas": 20,
        "capacity": 2,
        "batch_size": 160,
        "steps": 40,
        "dropped": 0.0,
        "late": 0.0,
        "lifetime_s": 1e9,
    }
    scene = Scene(bound=1, longest_s=60.0, **calm)
    apart, one = (LentPlay(scene, LeaseScene(lent=lent)) for lent in (0, 10))
    apart.run()
    one.run()
    assert apart.now / one.now > 1.25


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Scene,
        replicas=st.integers(1, 4),
        capacity=st.integers(1, 3),
        steps=st.integers(1, 25),
        batch_size=st.integers(1, 9),
        bound=st.integers(0, 3),
        surplus=st.integers(0, 3),
        interval=st.just(1),
        train_s=st.sampled_from([0.1, 100.0]),
        lifetime_s=st.sampled_from([100.0, 1e9]),
        seed=st.integers(0, 1000),
    ),
    st.builds(
        LeaseScene, lent=st.integers(1, 4), wake_s=st.sampled_from([0.1, 30.0]), sleep_s=st.sampled_from([0.1, 30.0])
    ),
)
def test_leases_of_any_kind(scene: Scene, leases: LeaseScene) -> None:
    LentPlay(scene, leases).run()


class Watched(Play):
    """A run in which no replica waits that could begin rows."""

    waited = 0

    def _hand_out(self) -> None:
        super()._hand_out()
        for name, (version, room) in self._dispatcher._waiting.items():
            if not self._by_name[name].asks:  # it has vanished
                continue
            self.waited += self._evaluation.room(version) > 0
            assert not self._dispatcher._claim(name, version, room, version < self.version).rows, name


@pytest.mark.parametrize("bound", [0, 2])
def test_no_free_place_for_rows_is_passed_over(bound: int) -> None:
    scene = Scene(replicas=12, batch_size=24, steps=6, bound=bound, evaluate=1, rows=60, lifetime_s=500.0, seed=bound)
    one = Watched(scene)
    one.run()
    assert one.waited, "rows wait for those that generate"
