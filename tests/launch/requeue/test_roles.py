"""How many nodes train and how many generate: step times by the waits of the roles, and a least gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hpcrl.config.sizes import NUM_ENGINES, POLICY_NODES
from hpcrl.launch.layouts import AttemptLayout
from hpcrl.launch.requeue.roles import RoleTimes, choose_layout, fewest_nodes


def sizes(trainer: int, engines: int) -> dict[str, int]:
    return {POLICY_NODES: trainer, NUM_ENGINES: engines}


LAYOUTS = [AttemptLayout(8, sizes(trainer, 8 - trainer)) for trainer in (1, 7, 2, 6, 3, 5, 4)]
TURNS = {"trains": 0.2, "generates": 0.8, "for_samples": 0.8, "for_training": 0.2}
FEW_SAMPLES = {"trains": 0.05, "generates": 0.95, "for_samples": 0.95, "for_training": 0.05}
AHEAD = {"trains": 0.4, "generates": 1.0, "for_samples": 0.6, "for_training": 0.0}


def times(own: Mapping[str, int], shares: Mapping[str, Any]) -> RoleTimes:
    return RoleTimes(own, 100.0, **shares)


def test_roles_that_take_turns_need_the_sum_of_their_times() -> None:
    measured = times(sizes(4, 4), TURNS)
    assert measured.expected_step_s(sizes(4, 4)) == pytest.approx(100)
    assert measured.expected_step_s(sizes(2, 6)) == pytest.approx(20 * 2 + 80 * 4 / 6)
    assert measured.expected_step_s(sizes(8, 8)) == pytest.approx(50)


def test_of_roles_that_work_side_by_side_the_longer_one_counts() -> None:
    measured = times(sizes(4, 4), AHEAD)
    assert measured.expected_step_s(sizes(4, 4)) == pytest.approx(100)
    assert measured.expected_step_s(sizes(2, 6)) == pytest.approx(80), (
        "training takes 40 * 2, and generation 100 * 4 / 6"
    )
    assert measured.expected_step_s(sizes(3, 5)) == pytest.approx(80), "generation takes 100 * 4 / 5"


def test_waits_for_something_else_stay_as_long() -> None:
    """The slowest samples, checkpoints: 30 of 80 seconds of generation, 10 of 20 of the trainer."""
    measured = times(sizes(4, 4), TURNS | {"trains": 0.1, "generates": 0.5})
    assert measured.expected_step_s(sizes(2, 6)) == pytest.approx(10 * 2 + 10 + 50 * 4 / 6 + 30)


def test_replicas_that_only_evaluate_generate_nothing() -> None:
    measured = times(sizes(4, 5), TURNS | {"evaluators": 1})
    assert measured.expected_step_s(sizes(4, 9)) == pytest.approx(20 + 80 / 2)


def test_nodes_go_to_the_role_for_which_the_other_waits() -> None:
    choice = choose_layout(LAYOUTS, times(sizes(4, 4), FEW_SAMPLES))
    assert choice.layout.sizes == sizes(2, 6)
    assert choice.why == (
        "the trainer waited 95% for samples, engines 5% for training; 73.3 s per step expected, 100 s with policy_num_nodes 4, num_engines 4"
    )
    other = {"trains": 0.9, "generates": 0.1, "for_samples": 0.1, "for_training": 0.9}
    assert choose_layout(LAYOUTS, times(sizes(4, 4), other)).layout.sizes == sizes(6, 2)
    of_fewer = choose_layout(LAYOUTS, times(sizes(2, 2), FEW_SAMPLES))
    assert (of_fewer.layout.sizes, of_fewer.step_s) == (sizes(2, 6), pytest.approx(73.3 / 2, abs=0.1))


def test_roles_stay_where_the_gain_is_small() -> None:
    """20 * 4 / 3 + 80 * 4 / 5 is 9.3 % less; and a gain that a measurement did not show is none."""
    assert choose_layout(LAYOUTS, times(sizes(4, 4), TURNS)).layout.sizes == sizes(4, 4)
    assert choose_layout(LAYOUTS, times(sizes(4, 4), TURNS), least_gain=0.09).layout.sizes == sizes(3, 5)
    assert choose_layout(LAYOUTS, times(sizes(3, 5), TURNS)).layout.sizes == sizes(3, 5), "not back to the usual one"
    measured = [(sizes(4, 4), 100.0), (sizes(2, 6), 99.0), (sizes(3, 5), 120.0), (sizes(1, 7), 95.0)]
    choice = choose_layout(LAYOUTS, times(sizes(4, 4), FEW_SAMPLES), measured)
    assert (choice.layout.sizes, choice.step_s) == (sizes(4, 4), 100.0)
    assert choice.why.endswith("no other sizes are expected to be 10% faster")
    back = choose_layout(LAYOUTS, times(sizes(2, 6), FEW_SAMPLES), [(sizes(2, 6), 100.0), (sizes(4, 4), 80.0)])
    assert (back.layout.sizes, back.step_s) == (sizes(4, 4), 80.0), "measured to be faster"
    stays = choose_layout(LAYOUTS, times(sizes(2, 6), FEW_SAMPLES), [(sizes(2, 6), 100.0), (sizes(4, 4), 95.0)])
    assert (stays.layout.sizes, stays.step_s) == (sizes(2, 6), 100.0), "less than a tenth faster"


def test_of_one_layout_no_choice_is_explained() -> None:
    only = choose_layout(LAYOUTS[:1], times(sizes(4, 4), FEW_SAMPLES))
    assert (only.layout, only.why) == (LAYOUTS[0], "")


@pytest.mark.parametrize(
    ("own", "shares", "measured", "least"),
    [
        (sizes(1, 1), {"trains": 1.0, "generates": 0.9, "for_samples": 0.0, "for_training": 0.1}, [], 2),
        (sizes(1, 1), {"trains": 1.0, "generates": 0.9, "for_samples": 0.0, "for_training": 0.1}, [(sizes(1, 1), 110.0)], 3),
        (sizes(1, 2), {"trains": 1.0, "generates": 0.4, "for_samples": 0.0, "for_training": 0.6}, [(sizes(1, 2), 100.0)], 2),
        (sizes(1, 2), {"trains": 1.0, "generates": 0.6, "for_samples": 0.0, "for_training": 0.4}, [], 3),
        (sizes(1, 1), {"trains": 0.1, "generates": 1.0, "for_samples": 0.9, "for_training": 0.0}, [(sizes(1, 2), 110.0)], 3),
        (sizes(1, 2), {"trains": 1.0, "generates": 0.6, "for_samples": 0.0, "for_training": 0.4}, [(sizes(1, 1), 50.0)], 3),
    ],
)  # fmt: skip
def test_more_nodes_that_shorten_no_step_are_not_used(
    own: dict[str, int], shares: dict[str, float], measured: list[tuple[dict[str, int], float]], least: int
) -> None:
    """Steps of (1, 1) and (1, 2) are as long while the trainer is the slower role; a short step that was measured long ago shows nothing."""
    waits = times(own, shares)
    fitting, smaller = [AttemptLayout(3, sizes(1, 2))], [AttemptLayout(2, sizes(1, 1))]
    choice = fewest_nodes(choose_layout(fitting, waits, measured), smaller, waits, measured)
    assert choice.layout.nodes == least
    assert choice.why == ("1 more node(s) would make its steps of 100 s no shorter" if least == 2 else "")
