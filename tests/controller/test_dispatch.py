"""The hand-out: nobody idles while there is work, nobody takes what another has room for, and the least loaded comes first."""

from __future__ import annotations

import pytest

from hpcrl.controller.admission import Admission
from hpcrl.controller.dispatch import Dispatcher
from hpcrl.controller.evaluation import EvalQueue
from tests.controller.test_admission import compose, meta


def dispatcher(batch_size: int, staleness: int = 0, *, at_once: int | None = None, rows: int = 0) -> Dispatcher:
    evaluation = EvalQueue(1024)
    evaluation.begin(0, rows)
    return Dispatcher(Admission(batch_size, staleness, 99, at_once), evaluation, n_samples=2, eval_n_samples=1)


def admission(of: Dispatcher) -> Admission:
    return of._admission


def finish(of: Dispatcher, indices: list[int], version: int) -> None:
    for index in indices:
        worker = admission(of).worker_of(index)
        assert admission(of).complete(index, meta(index, version)) is None
        assert worker is not None
        of.load_changed(worker)


def join(of: Dispatcher, *workers: str) -> None:
    for worker in workers:
        of.join(worker)


def test_a_worker_leaves_the_others_their_part() -> None:
    one = dispatcher(9)
    join(one, "a", "b", "c")
    assert len(one.claim("a", 0, 9).indices) == 3
    assert not one.claim("a", 0, 6)
    assert len(one.claim("b", 0, 9).indices) == 3
    assert len(one.claim("c", 0, 9).indices) == 3


def test_what_does_not_fit_into_small_workers_goes_to_the_others() -> None:
    one = dispatcher(20)
    join(one, "small", "large", "other")
    assert len(one.claim("small", 0, 2).indices) == 2
    assert len(one.claim("large", 0, 99).indices) == 9
    assert len(one.claim("other", 0, 99).indices) == 9


def test_the_least_loaded_of_those_that_wait_is_served_first() -> None:
    """Three have finished different numbers of groups when a fourth one, that all the others' places were lost to, leaves."""
    one = dispatcher(12)
    join(one, "a", "b", "c", "gone")
    held = {worker: one.claim(worker, 0, 9).indices for worker in ("a", "b", "c", "gone")}
    for worker in ("a", "b", "c"):
        one.wait(worker, 0, 6)
    finish(one, held["b"], 0)
    finish(one, held["c"][:1], 0)
    assert list(one.assignments(0)) == []
    one.leave("gone")
    admission(one).release("gone")
    assigned = list(one.assignments(0))
    assert [(worker, assignment.indices) for worker, assignment in assigned] == [("b", held["gone"])]
    assert list(one.assignments(0)) == []


def test_who_has_left_or_waits_no_longer_is_given_nothing() -> None:
    one = dispatcher(2, at_once=1)
    join(one, "a", "b", "c")
    (index,) = one.claim("a", 0, 1).indices
    one.wait("b", 0, 1)
    one.wait("c", 0, 1)
    one.leave("b")
    one.withdraw("c")
    finish(one, [index], 0)
    assert list(one.assignments(0)) == []
    one.wait("c", 0, 1)
    assert [worker for worker, _ in one.assignments(0)] == ["c"]


def test_what_a_step_frees_is_shared_among_all_that_wait() -> None:
    """The bound of staleness lets three batches be under way, but only one of them is missing."""
    one = dispatcher(4, 2)
    join(one, "a", "b", "c", "d")
    finish(one, [index for worker in "abcd" for index in one.claim(worker, 0, 8).indices], 0)
    for worker in "abcd":
        assert not one.claim(worker, 0, 8)
        one.wait(worker, 1, 8)
    assert compose(admission(one)) is not None
    assert sorted((worker, len(assignment.indices)) for worker, assignment in one.assignments(1)) == [
        (w, 1) for w in "abcd"
    ]


def test_rows_of_an_evaluation_go_to_those_that_have_none() -> None:
    one = dispatcher(0, rows=4)
    join(one, "a", "b")
    assert len(one.claim("a", 0, 4).rows) == 2
    assert not one.claim("a", 0, 3).rows
    one.wait("a", 0, 3)
    one.wait("b", 0, 3)
    assert [(worker, len(assignment.rows)) for worker, assignment in one.assignments(0)] == [("b", 2)]


def test_rows_are_not_kept_from_a_worker_by_one_with_less_to_do_and_a_group() -> None:
    """The first one has a single group, which is less than the three rows of the second one, whose places are free."""
    one = dispatcher(1, rows=8)
    join(one, "a", "b", "lost")
    assert len(one.claim("a", 0, 9).indices) == 1
    assert len(one.claim("b", 0, 9).rows) == 3
    assert len(one.claim("lost", 0, 9).rows) == 3
    one.wait("a", 0, 8)
    one.wait("b", 0, 7)
    one.leave("lost")
    one._evaluation.release("lost")
    assert [(worker, len(assignment.rows)) for worker, assignment in one.assignments(0)] == [("b", 1)]


@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize("capacity", [1, 4, 100])
def test_nobody_is_idle_while_there_is_work(workers: int, capacity: int) -> None:
    one = dispatcher(5, 1)
    names = [f"w{number}" for number in range(workers)]
    join(one, *names)
    got = {name: len(one.claim(name, 0, capacity).indices) for name in names}
    assert max(got.values()) <= capacity
    assert sum(got.values()) == min(10, workers * capacity)
    assert min(got.values()) > 0


def test_a_worker_that_came_back_has_the_room_that_it_says_now() -> None:
    one = dispatcher(8)
    join(one, "a", "b")
    assert len(one.claim("a", 0, 1).indices) == 1
    one.leave("a")
    admission(one).release("a")
    join(one, "a")
    assert len(one.claim("b", 0, 9).indices) == 4, "half of it is left for who says nothing yet"
    assert len(one.claim("a", 0, 9).indices) == 4
