"""Groups that are begun beyond those that steps need: a step does not wait for its slowest ones, and nothing of it is lost or counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.controller.admission import Admission
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from tests.controller.test_admission import compose, meta
from tests.controller.test_api import batch_of, finish, make_run
from tests.controller.test_service import do, service


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def indices(admission: Admission) -> list[int] | None:
    batch = compose(admission)
    return None if batch is None else [index for index, _ in batch]


def test_a_step_does_not_wait_for_as_many_groups_as_are_surplus() -> None:
    admission = Admission(batch_size=2, staleness=0, total_steps=3, surplus=1)
    assert admission.claim("a", 0, 9) == [0, 1, 2]
    admission.complete(2, meta(2, 0))
    assert indices(admission) is None
    admission.complete(0, meta(0, 0))
    assert indices(admission) == [0, 2]
    assert not admission.wants(1)
    assert admission.complete(1, meta(1, 0)) == "finished before, or given up"
    assert admission.claim("a", 1, 9) == [3, 4, 5]


def test_a_surplus_group_trains_in_a_later_step_where_staleness_allows() -> None:
    admission = Admission(batch_size=2, staleness=1, total_steps=9, surplus=1)
    assert admission.claim("a", 0, 9) == [0, 1, 2, 3, 4]
    for index in (2, 3):
        admission.complete(index, meta(index, 0))
    assert indices(admission) == [2, 3]
    assert all(admission.wants(index) for index in (0, 1, 4))
    assert admission.claim("a", 1, 9) == [5, 6]
    for index in (1, 5, 6):
        admission.complete(index, meta(index, 1 if index > 4 else 0))
    assert indices(admission) is None, "two of 0, 1 and 4 have to train now"
    admission.complete(4, meta(4, 0))
    assert indices(admission) == [1, 4]
    assert not admission.wants(0)


def test_a_finished_group_that_is_too_many_and_too_old_is_given_up() -> None:
    admission = Admission(batch_size=2, staleness=0, total_steps=3, surplus=2)
    admission.claim("a", 0, 9)
    for index in range(3):
        admission.complete(index, meta(index, 0))
    assert admission.overdue([0, 1]) == [2, 3]
    assert indices(admission) == [0, 1]
    assert (admission.finished, admission.running) == (0, 0)


def test_the_last_step_gives_up_all_that_is_left() -> None:
    admission = Admission(batch_size=1, staleness=5, total_steps=1, surplus=2)
    assert admission.claim("a", 0, 9) == [0, 1, 2]
    admission.release("a", [0, 2])
    admission.complete(0, meta(0, 0))
    assert admission.overdue([0]) == [1, 2]
    assert indices(admission) == [0]
    assert admission.claim("a", 0, 9) == []


def test_what_is_given_up_is_written_down_and_never_generated_again(run: Run) -> None:
    controller = service(run, eval_interval=0, surplus=1)
    controller.start(0)
    work = controller.claim("rollout-0", 0, 9)
    assert len(work) == 3
    do(run, controller, work[1:], 0)
    assert controller.batch(1)
    batch = batch_of(run, 1)
    assert batch.given_up == [work[0].group_id]
    assert merged(run)[1]["generate/given_up_groups"] == 1
    held = [item.group_id for item in work]
    assert controller.unwanted("rollout-0", held) == held
    assert controller.complete([finish(run, work[0], 0)]) == {work[0].group_id: "finished before, or given up"}
    for attempt, step in ((2, 0), (3, 1)):
        again = service(run, attempt, eval_interval=0, surplus=1)
        again.start(step)
        more = {item.group_id for item in again.claim("rollout-0", step, 9)}
        assert not more & {item.group_id for item in work}
        assert len(more) == 3 * (step == 1)


def test_surplus_does_not_count_as_dropped_by_dynamic_sampling(run: Run) -> None:
    controller = service(run, eval_interval=0, surplus=2, staleness=1)
    controller.start(0)
    work = controller.claim("rollout-0", 0, 9)
    assert len(work) == 6
    do(run, controller, work[:2], 0)
    controller.published(1)
    do(run, controller, work[2:4], 0)
    batch = batch_of(run, 2)
    assert batch.given_up == [item.group_id for item in work[4:]]
    assert batch.dropped == {}
