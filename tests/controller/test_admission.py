"""Admission simulated: the staleness bound is hard, every group trains once, and a lost worker loses nothing."""

from __future__ import annotations

import random
import time

import pytest

from hpcrl.controller.admission import Admission, staleness
from hpcrl.controller.sampling import PromptStream
from hpcrl.errors import DataError
from hpcrl.types import GroupMeta


def meta(index: int, version: int) -> GroupMeta:
    return GroupMeta(
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


def test_on_policy_hands_out_one_batch_per_version() -> None:
    admission = Admission(batch_size=4, staleness=0, total_steps=2)
    assert admission.claim("a", 0, 3) == [0, 1, 2]
    assert admission.claim("b", 0, 3) == [3]
    assert admission.claim("b", 0, 3) == []
    assert admission.compose() is None
    for index in (3, 1, 0, 2):
        assert admission.compose() is None
        assert admission.complete(index, meta(index, 0)) is None
    batch = admission.compose()
    assert batch is not None
    assert [index for index, _ in batch] == [0, 1, 2, 3]
    assert admission.claim("a", 0, 4) == [], "version 0 may not begin groups of step 2"
    assert admission.claim("a", 1, 9) == [4, 5, 6, 7]
    for index in range(4, 8):
        admission.complete(index, meta(index, 1))
    assert admission.compose() is not None
    assert admission.claim("a", 2, 4) == [], "all steps are done"


@pytest.mark.parametrize("at_once", [None, 1, 5, 7])
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_bound_holds_and_every_group_trains_once(bound: int, seed: int, at_once: int | None) -> None:
    """Workers of random speed, versions that lag, workers that vanish: the invariants hold."""
    chance, batch_size, steps = random.Random(seed), 5, 30
    admission = Admission(batch_size, bound, steps, at_once)
    version, running, trained = 0, list[tuple[int, int, str]](), list[int]()
    workers = {"a": 0, "b": 0, "c": 0}
    while version < steps:
        name = chance.choice(list(workers))
        if chance.random() < 0.5:
            workers[name] = version
        running += [(i, workers[name], name) for i in admission.claim(name, workers[name], chance.randint(0, 4))]
        assert admission.running == len(running) <= (at_once or batch_size * (bound + 1))
        if chance.random() < 0.05:
            lost = admission.release(name)
            assert sorted(lost) == sorted(i for i, _, owner in running if owner == name)
            running = [entry for entry in running if entry[2] != name]
        chance.shuffle(running)
        for _ in range(chance.randint(0, 4)):
            if running:
                index, begun, _ = running.pop()
                assert admission.complete(index, meta(index, begun)) is None
        batch = admission.compose()
        if batch:
            version += 1
            assert len(batch) == batch_size
            assert max(staleness(version, group) for _, group in batch) <= bound
            trained += [index for index, _ in batch]
    assert sorted(trained) == list(range(batch_size * steps))


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
    assert admission.complete(0, meta(0, 0)) == "finished before"


def test_late_answer_of_a_lost_worker_counts_once() -> None:
    admission = Admission(batch_size=2, staleness=0, total_steps=1)
    assert admission.claim("a", 0, 2) == [0, 1]
    assert admission.release("a") == [0, 1]
    assert admission.complete(1, meta(1, 0)) is None
    assert admission.claim("b", 0, 5) == [0]


def test_restore_uses_finished_groups_and_begins_the_missing_ones() -> None:
    admission = Admission(batch_size=4, staleness=0, total_steps=3)
    admission.restore(1, range(4), {5: meta(5, 1), 7: meta(7, 1)})
    assert admission.claim("a", 1, 9) == [4, 6]
    admission.complete(4, meta(4, 1))
    admission.complete(6, meta(6, 1))
    batch = admission.compose()
    assert batch is not None
    assert [index for index, _ in batch] == [4, 5, 6, 7]


def test_million_groups_are_quick() -> None:
    admission, started = Admission(batch_size=1000, staleness=2, total_steps=1000), time.monotonic()
    for version in range(1000):
        while claimed := admission.claim("a", version, 100):
            for index in claimed:
                admission.complete(index, meta(index, version))
        assert admission.compose() is not None
    assert time.monotonic() - started < 60


def test_stream_is_a_permutation_per_epoch_and_stable() -> None:
    stream = PromptStream(n_prompts=10, batch_size=3, seed=1, order_seed=1)
    assert stream.steps_per_epoch == 3
    first, second = [stream.row(i) for i in range(9)], [stream.row(i) for i in range(9, 18)]
    assert len(set(first)) == 9
    assert first != second
    assert first == [PromptStream(10, 3, 1, 1).row(i) for i in range(9)]
    assert stream.sampling_seed(3) != stream.sampling_seed(4)
    other = PromptStream(10, 3, 1, order_seed=2)
    assert first != [other.row(i) for i in range(9)]
    assert stream.sampling_seed(3) == other.sampling_seed(3), "the order is not part of what is sampled"
    assert [PromptStream(10, 3, 1, None).row(i) for i in range(12)] == [*range(9), 0, 1, 2]
    with pytest.raises(DataError, match="train_batch_size = 3"):
        PromptStream(n_prompts=2, batch_size=3, seed=1, order_seed=1)
