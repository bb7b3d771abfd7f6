"""When a run gives its nodes back for more of them: restart against gained steps, at most so often."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.launch.requeue.growth import UNMEASURED_SPEEDUP, Growth, choose_growth, expected_step_s, grew_lately

HOUR = 3600.0


def chosen(**numbers: Any) -> Growth | None:
    usual: dict[str, Any] = {"held": 2, "candidates": [4], "restart_s": 300.0}
    usual |= {"step_s": {2: 60.0, 4: 30.0}, "steps_left": 1000, "left_s": 8 * HOUR}
    return choose_growth(**{**usual, **numbers})


def test_gain_is_the_time_of_the_same_steps() -> None:
    assert chosen() == Growth(4, 8 * HOUR - 300 - 4 * HOUR), "until the allocation ends"
    assert chosen(steps_left=100) == Growth(4, 6000 - 300 - 3000), "until the run ends"


def test_a_restart_has_to_gain_twice_its_time() -> None:
    assert chosen(left_s=1201) == Growth(4, 300.5)
    assert chosen(left_s=1199) is None
    assert chosen(steps_left=19) is None
    assert chosen(steps_left=0) is None
    assert chosen(left_s=-5.0) is None, "past the time at which it saves"


def test_never_twice_within_an_hour() -> None:
    assert grew_lately(10 * HOUR, 9 * HOUR + 1, HOUR)
    assert not grew_lately(10 * HOUR, 9 * HOUR - 1, HOUR)
    assert not grew_lately(10 * HOUR, 9 * HOUR + 1, 60)
    assert not grew_lately(10 * HOUR, None, HOUR)


def test_the_largest_gain_counts_and_not_the_most_nodes() -> None:
    step_s = {2: 60.0, 3: 40.0, 4: 30.0, 8: 31.0}
    assert chosen(candidates=[8, 4, 3], step_s=step_s) == chosen()
    assert chosen(candidates=[1, 2], step_s=step_s) is None, "no fewer nodes, nor the same"
    assert chosen(candidates=[]) is None
    assert chosen(step_s={2: 60.0, 4: 60.0}) is None, "measured: more nodes are not faster"


def test_seconds_of_a_step_on_sizes_that_were_not_measured() -> None:
    assert expected_step_s({2: 60.0}, 2, 4) == pytest.approx(60 / 2**UNMEASURED_SPEEDUP)
    assert expected_step_s({2: 60.0, 4: 30.0}, 2, 8) == pytest.approx(15.0), "as the measured sizes have it"
    assert expected_step_s({2: 60.0, 4: 60 / 2**0.5}, 2, 8) == pytest.approx(30.0)
    assert expected_step_s({2: 60.0, 1: 90.0}, 2, 4) == pytest.approx(40.0), "also from fewer nodes"
    assert expected_step_s({2: 60.0, 4: 10.0}, 2, 8) == pytest.approx(15.0), "at most in proportion"
    assert expected_step_s({2: 60.0, 4: 70.0}, 2, 8) == 60.0
    assert expected_step_s({4: 60.0, 1: 60.0, 6: 40.0}, 4, 8) == pytest.approx(30.0), "the nearest size"
