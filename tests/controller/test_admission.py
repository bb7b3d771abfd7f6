"""Admission simulated: the staleness bound is hard, every group trains once, and a lost worker loses nothing."""

from __future__ import annotations

import random
import time

import pytest

from hpcrl.controller.admission import Admission, staleness
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.errors import DataError
from hpcrl.types import GroupMeta
from tests.rows import group_meta


def meta(index: int, version: int) -> GroupMeta:
    return group_meta(
        group_id=f"g{index:08d}",
        kind="train",
        replica=0,
        path=f"samples/0/g{index:08d}.safetensors",
        rewards=[0.0],
        lengths=[2],
        response_lengths=[1],
        stop_reasons=["stop"],
        oldest_version=version,
        newest_version=version,
        data_source="test",
        seconds=0.0,
    )


def compose(admission: Admission) -> list[tuple[int, GroupMeta]] | None:
    ready = admission.ready()
    if ready:
        admission.take([index for index, _ in ready])
    return ready


def test_on_policy_hands_out_one_batch_per_version() -> None:
    admission = Admission(batch_size=4, staleness=0, total_steps=2)
    assert admission.claim("a", 0, 3) == [0, 1, 2]
    assert admission.claim("b", 0, 3) == [3]
    assert admission.claim("b", 0, 3) == []
    assert compose(admission) is None
    for index in (3, 1, 0, 2):
        assert compose(admission) is None
        assert admission.complete(index, meta(index, 0)) is None
    batch = compose(admission)
    assert batch is not None
    assert [index for index, _ in batch] == [0, 1, 2, 3]
    assert admission.claim("a", 0, 4) == [], "version 0 may not begin groups of step 2"
    assert admission.claim("a", 1, 9) == [4, 5, 6, 7]
    for index in range(4, 8):
        admission.complete(index, meta(index, 1))
    assert compose(admission) is not None
    assert admission.claim("a", 2, 4) == [], "all steps are done"


@pytest.mark.parametrize("dropped", [0.0, 0.6])
@pytest.mark.parametrize("at_once", [None, 1, 5, 7])
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_bound_holds_and_every_group_trains_once_or_is_dropped(
    bound: int, seed: int, at_once: int | None, dropped: float
) -> None:
    """Workers of random speed, versions that lag, groups that take long, workers that vanish and answer late: the invariants hold."""
    chance, batch_size, steps = random.Random(seed), 5, 30
    admission = Admission(batch_size, bound, steps, at_once)
    version, running, trained, gone = 0, list[tuple[int, int, str]](), list[int](), list[int]()
    late = list[tuple[int, int]]()
    workers = {"a": 0, "b": 0, "c": 0}

    def complete(index: int, begun: int) -> str | None:
        reason = admission.complete(index, meta(index, begun))
        if reason is None and chance.random() < dropped:
            admission.drop([index])
            gone.append(index)
        return reason

    while version < steps:
        name = chance.choice(list(workers))
        if chance.random() < 0.5:
            workers[name] = version
        running += [(i, workers[name], name) for i in admission.claim(name, workers[name], chance.randint(0, 4))]
        assert admission.running == len(running) <= (at_once or batch_size * (bound + 1))
        assert admission.finished + admission.running <= batch_size * (bound + 1)
        if chance.random() < 0.05:
            lost = admission.release(name)
            assert sorted(lost) == sorted(i for i, _, owner in running if owner == name)
            late += [(index, begun) for index, begun, owner in running if owner == name]
            running = [entry for entry in running if entry[2] != name]
        if late and chance.random() < 0.1:
            index, begun = late.pop(chance.randrange(len(late)))
            if complete(index, begun) is None:
                running = [entry for entry in running if entry[0] != index]
        slow = chance.random() < 0.5  # groups of odd numbers take longer
        chance.shuffle(running)
        running.sort(key=lambda entry: not entry[0] % 2)
        for _ in range(chance.randint(0, 4)):
            if running and not (slow and running[-1][0] % 2):
                index, begun, _ = running.pop()
                assert complete(index, begun) is None
        batch = compose(admission)
        if batch:
            version += 1
            assert len(batch) == batch_size
            assert max(staleness(version, group) for _, group in batch) <= bound
            trained += [index for index, _ in batch]
    assert len(trained) == batch_size * steps
    assert sorted(trained + gone) == list(range(batch_size * steps + len(gone))), "nothing twice, and nothing too much"


def test_a_step_leaves_no_more_for_the_next_one_than_fits() -> None:
    """Two groups of version 0 must train by step 3; while both run, step 2 does not take a group that could wait."""
    admission = Admission(batch_size=1, staleness=2, total_steps=9)
    assert admission.claim("a", 0, 9) == [0, 1, 2]
    admission.complete(0, meta(0, 0))
    assert compose(admission) is not None
    assert admission.claim("a", 1, 9) == [3]
    admission.complete(3, meta(3, 1))
    assert compose(admission) is None
    admission.complete(2, meta(2, 0))
    assert [index for index, _ in compose(admission) or []] == [2]
    assert compose(admission) is None, "the other one must train now"
    admission.complete(1, meta(1, 0))
    assert [index for index, _ in compose(admission) or []] == [1]
    assert [index for index, _ in compose(admission) or []] == [3]


def test_as_many_groups_are_begun_as_are_missing() -> None:
    admission = Admission(batch_size=4, staleness=0, total_steps=3)
    assert admission.claim("a", 0, 9) == [0, 1, 2, 3]
    for index in (0, 2, 3):
        admission.complete(index, meta(index, 0))
    admission.drop([0, 2])
    assert [group.group_id for group in admission.dropped] == ["g00000000", "g00000002"]
    assert admission.claim("a", 0, 9) == [4, 5]
    assert admission.complete(0, meta(0, 0)) == "finished before, or given up"
    for index in (1, 4, 5):
        admission.complete(index, meta(index, 0))
    batch = compose(admission)
    assert batch is not None
    assert [index for index, _ in batch] == [1, 3, 4, 5]
    assert admission.dropped == []
    assert admission.claim("a", 1, 9) == [6, 7, 8, 9]


def test_groups_in_flight_are_bounded_over_all_workers() -> None:
    admission = Admission(batch_size=4, staleness=1, total_steps=9, at_once=5)
    assert admission.claim("a", 0, 4) == [0, 1, 2, 3]
    assert admission.claim("b", 0, 4) == [4]
    assert admission.claim("b", 0, 4) == []
    admission.complete(2, meta(2, 0))
    assert admission.claim("b", 0, 4) == [5]
    admission.release("a")
    assert admission.claim("c", 0, 9) == [0, 1, 3]


def test_complete_tells_what_is_not_wanted() -> None:
    admission = Admission(batch_size=2, staleness=0, total_steps=1)
    admission.claim("a", 0, 1)
    assert admission.complete(7, meta(7, 0)) == "never claimed"
    assert admission.complete(0, meta(0, 0)) is None
    assert admission.complete(0, meta(0, 0)) == "finished before, or given up"


def test_late_answer_of_a_lost_worker_counts_once() -> None:
    admission = Admission(batch_size=2, staleness=0, total_steps=1)
    assert admission.claim("a", 0, 2) == [0, 1]
    assert admission.release("a") == [0, 1]
    assert admission.complete(1, meta(1, 0)) is None
    assert admission.claim("b", 0, 5) == [0]


def test_a_lost_worker_goes_on_with_what_nobody_has_begun_meanwhile() -> None:
    admission = Admission(batch_size=3, staleness=0, total_steps=2)
    assert admission.claim("a", 0, 3) == [0, 1, 2]
    admission.release("a")
    assert admission.claim("b", 0, 1) == [0]
    admission.reclaim("a", 0, [0, 1])
    assert admission.running == 2
    assert admission.release("b", [0]) == []
    assert admission.claim("a", 0, 9) == [2]
    for index in range(3):
        assert admission.complete(index, meta(index, 0)) is None
    assert compose(admission) is not None


def test_a_lost_worker_does_not_go_on_with_what_has_no_room() -> None:
    admission = Admission(batch_size=2, staleness=0, total_steps=2)
    admission.claim("a", 0, 2)
    admission.release("a")
    admission.reclaim("a", 0, [1])
    assert admission.claim("b", 0, 9) == [0]
    admission.release("a")
    admission.complete(0, meta(0, 0))
    admission.complete(1, meta(1, 0))
    compose(admission)
    assert admission.claim("b", 1, 9) == [2, 3]
    admission.release("b", [2])
    admission.reclaim("a", 0, [3])
    assert admission.running == 1, "version 0 may not begin groups of step 2"


def test_late_answer_that_is_too_old_is_generated_again() -> None:
    """Also where another worker generates the group by now: that one's answer counts."""
    admission = Admission(batch_size=1, staleness=0, total_steps=3)
    assert admission.claim("a", 0, 1) == [0]
    admission.release("a")
    admission.claim("b", 0, 1)
    admission.complete(0, meta(0, 0))
    compose(admission)
    assert admission.claim("a", 1, 1) == [1]
    assert admission.complete(1, meta(1, 0)) == "too old by now"
    assert admission.complete(1, meta(1, 1)) is None
    assert compose(admission) is not None
    assert admission.claim("a", 2, 1) == [2]
    admission.release("a")
    assert admission.complete(2, meta(2, 1)) == "too old by now"
    assert admission.claim("b", 2, 1) == [2]


def test_restore_uses_finished_groups_and_begins_the_missing_ones() -> None:
    admission = Admission(batch_size=4, staleness=0, total_steps=3)
    admission.restore(1, range(4), {5: meta(5, 1), 7: meta(7, 1)})
    assert admission.claim("a", 1, 9) == [4, 6]
    admission.complete(4, meta(4, 1))
    admission.complete(6, meta(6, 1))
    batch = compose(admission)
    assert batch is not None
    assert [index for index, _ in batch] == [4, 5, 6, 7]


def test_groups_of_an_attempt_with_a_higher_bound_are_generated_again() -> None:
    admission = Admission(batch_size=2, staleness=0, total_steps=3)
    admission.restore(0, [], {index: meta(index, 0) for index in range(5)})
    assert [index for index, _ in compose(admission) or []] == [0, 1]
    assert compose(admission) is None
    assert admission.claim("a", 1, 9) == [2, 3]
    assert admission.claim("a", 1, 9) == []


def test_many_groups_are_quick() -> None:
    """200,000 of them, of which one of four is worth training."""
    admission, began = Admission(batch_size=250, staleness=2, total_steps=200), time.process_time()
    for version in range(200):
        while claimed := admission.claim("a", version, 100):
            for index in claimed:
                admission.complete(index, meta(index, version))
            admission.drop([index for index in claimed if index % 4])
        assert compose(admission) is not None
    assert admission.cursor > 190_000
    assert time.process_time() - began < 12


def test_stream_is_a_permutation_per_epoch_and_stable() -> None:
    stream = PromptStream(n_prompts=10, batch_size=3, seed=1, order_seed=1)
    assert stream.steps_per_epoch == 3
    first, second = [stream.row(i) for i in range(9)], [stream.row(i) for i in range(9, 18)]
    assert len(set(first)) == 9
    assert first != second
    assert first == [PromptStream(10, 3, 1, 1).row(i) for i in range(9)]
    assert [stream.epoch(i) for i in (0, 8, 9, 18)] == [0, 0, 1, 2]
    assert stream.sampling_seed(3) != stream.sampling_seed(4)
    other = PromptStream(10, 3, 1, order_seed=2)
    assert first != [other.row(i) for i in range(9)]
    assert stream.sampling_seed(3) == other.sampling_seed(3), "the order is not part of what is sampled"
    assert [PromptStream(10, 3, 1, None).row(i) for i in range(12)] == [*range(9), 0, 1, 2]
    whole = PromptStream(10, 3, 1, 1, drop_last=False)
    assert [sorted(whole.row(10 * epoch + i) for i in range(10)) for epoch in range(3)] == [list(range(10))] * 3
    assert [whole.epoch(index) for index in (9, 10, 19, 20)] == [0, 1, 1, 2]
    few = PromptStream(2, 5, 1, None, drop_last=False)
    assert [few.row(index) for index in range(10)] == [0, 1] * 5
    with pytest.raises(DataError, match="train_batch_size = 3"):
        PromptStream(n_prompts=2, batch_size=3, seed=1, order_seed=1)
