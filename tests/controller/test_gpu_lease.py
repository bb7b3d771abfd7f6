"""Whose turn it is on devices that trainer and engines share: the trainer gets a batch when all engines sleep, engines wake when it has published."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.controller import api
from hpcrl.controller.replicas import GpuLease
from hpcrl.data.batch_file import read_batch
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.process_status import GIVEN_UP, StatusWriter
from hpcrl.types import Work
from tests.controller.test_api import SCHEDULE, end, finish, make_run, serve_attempt, work_of

SYNCHRONOUS = replace(SCHEDULE, eval_before_train=False, colocated=True)
FIRST, SECOND = "rollout-0", "rollout-1"


class Side:
    """Calls of one process after the other, each in a thread: the answer to one that waits is a future."""

    def __init__(self, run: Run) -> None:
        self._controller, self._thread = ControllerClient(run, 1, patience_s=10), ThreadPoolExecutor(1)

    def ask(self, route: str, **payload: Any) -> Future[dict[str, Any]]:
        return self._thread.submit(self._controller.call, route, **payload)

    def call(self, route: str, **payload: Any) -> dict[str, Any]:
        return self.ask(route, **payload).result(15)

    def lease(self, worker: str) -> Future[dict[str, Any]]:
        return self.ask("lease", worker=worker, awake=False)

    def recall(self, worker: str) -> Future[dict[str, Any]]:
        return self.ask("lease", worker=worker, awake=True)

    def claim(self, worker: str, version: int = 0) -> Future[dict[str, Any]]:
        return self.ask("claim", worker=worker, version=version, capacity=4, holding=[])

    def close(self) -> None:
        self._controller.close()
        self._thread.shutdown()


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = make_run(tmp_path / "project" / "run")
    served = serve_attempt(run, 1, getattr(request, "param", SYNCHRONOUS))
    yield run
    end(run, 1, served)


@pytest.fixture
def sides(run: Run) -> Iterator[list[Side]]:
    """The trainer's side, and those of two workers."""
    sides = [Side(run) for _ in range(3)]
    yield sides
    write_json(run.stop, {"attempt": 1, "reason": "finished"})  # which answers what they still ask
    for side in sides:
        side.close()


def generate(run: Run, worker: Side, name: str) -> None:
    """Finish all groups of the step at hand."""
    complete(run, worker, name, work_of(worker.claim(name).result(15)))


def complete(run: Run, worker: Side, name: str, work: list[Work]) -> None:
    worker.call("complete", worker=name, groups=[finish(run, item, 0).to_json() for item in work])


def waits(answer: Future[dict[str, Any]]) -> bool:
    time.sleep(0.1)
    return not answer.done()


def test_trainer_and_engines_take_turns(run: Run, sides: list[Side]) -> None:
    trainer, first, second = sides
    asked = first.lease(FIRST)
    assert waits(asked), "the trainer loads, and has the devices meanwhile"
    trainer.call("start", step=0)
    assert asked.result(15)["lease"]
    assert second.lease(SECOND).result(15)["lease"]
    work = work_of(first.claim(FIRST).result(15))
    recalled = second.recall(SECOND)
    assert waits(recalled)
    complete(run, first, FIRST, work)
    assert not recalled.result(15)["lease"], "at once"
    batch = trainer.ask("next", step=1, wait=10.0)
    assert waits(batch), "both are awake"
    sleeps = first.lease(FIRST)
    assert waits(batch), "the second one is"
    others = second.lease(SECOND)
    assert batch.result(15)["path"] == "batches/s000001.json"
    assert waits(sleeps)
    trainer.call("published", version=1)
    assert [each.result(15) for each in (sleeps, others)] == [{"stop": None, "version": 1, "lease": True}] * 2


@pytest.mark.parametrize("run", [replace(SYNCHRONOUS, staleness=1)], indirect=True, ids=["asynchronous"])
def test_the_lease_is_recalled_as_soon_as_the_batch_is_there(run: Run, sides: list[Side]) -> None:
    """Other groups are begun: they stay with their worker, and train in the next step."""
    trainer, first, second = sides
    trainer.call("start", step=0)
    assert first.lease(FIRST).result(15)["lease"]
    work = work_of(first.claim(FIRST).result(15))
    size = SYNCHRONOUS.batch_size
    assert len(work) == 2 * size, "begun for both steps"
    holds = second.recall(FIRST)
    complete(run, first, FIRST, work[:size])
    assert not holds.result(15)["lease"]
    left = [item.group_id for item in work[size:]]
    claimed = first.ask("claim", worker=FIRST, version=0, capacity=4, holding=left)
    assert waits(claimed), "nothing begins before the trainer has published"
    asleep = second.lease(FIRST)
    assert trainer.call("next", step=1)["path"]
    trainer.call("published", version=1)
    assert claimed.result(15)["version"] == 1
    assert claimed.result(15)["unwanted"] == []
    assert asleep.result(15) == {"stop": None, "version": 1, "lease": True}
    again = second.recall(FIRST)
    complete(run, first, FIRST, work[size:])
    assert not again.result(15)["lease"]
    second.lease(FIRST)
    assert trainer.call("next", step=2)["path"]
    trained = read_batch(run.batch(2))
    assert trained
    assert [group.group_id for group in trained.batch.groups] == left


@pytest.mark.parametrize("run", [replace(SYNCHRONOUS, staleness=1)], indirect=True, ids=["asynchronous"])
@pytest.mark.parametrize("state", ["awake", "recalled", "asleep", "asking"])
def test_begun_groups_of_a_worker_that_is_killed_are_trained_once(run: Run, sides: list[Side], state: str) -> None:
    """In each state of its lease; another one generates them when it has the lease."""
    trainer, first, second = sides
    trainer.call("start", step=0)
    assert first.lease(FIRST).result(15)["lease"]
    work, size = work_of(first.claim(FIRST).result(15)), SYNCHRONOUS.batch_size
    if state != "awake":
        complete(run, first, FIRST, work[:size])
    if state == "recalled":
        assert not first.recall(FIRST).result(15)["lease"]
    if state in ("asleep", "asking"):
        assert waits(first.lease(FIRST))
    trainer.call("leave", worker=FIRST)
    asked = second.lease(SECOND)
    if state == "asking":  # the one in its place asks too
        assert waits(asked)
        trainer.call("leave", worker=SECOND)
        second = Side(run)
        sides.append(second)
        asked = second.lease(SECOND)
    if state == "awake":
        assert asked.result(15)["lease"]
        again = work_of(second.claim(SECOND).result(15))
        assert [item.group_id for item in again] == [item.group_id for item in work]
        complete(run, second, SECOND, again[:size])
        asked = second.lease(SECOND)
    assert waits(asked)
    assert trainer.call("next", step=1)["path"]
    trainer.call("published", version=1)
    assert asked.result(15)["lease"]
    holding = [item.group_id for item in work[size:]] if state == "awake" else []
    claimed = second.ask("claim", worker=SECOND, version=1, capacity=4, holding=holding)
    again = work[size:] if holding else work_of(claimed.result(15))
    assert [item.group_id for item in again] == [item.group_id for item in work[size:]]
    complete(run, trainer, SECOND, again)
    second.lease(SECOND)
    assert trainer.call("next", step=2, wait=10.0)["path"], "also where a claim of the same worker waits first"
    trained = [read_batch(run.batch(step)) for step in (1, 2)]
    names = [group.group_id for batch in trained if batch for group in batch.batch.groups]
    assert names == [item.group_id for item in work]


def test_a_holder_whose_process_was_ended_has_to_give_back(sides: list[Side]) -> None:
    trainer, first, _ = sides
    trainer.call("start", step=0)
    assert first.lease(FIRST).result(15)["lease"]
    trainer.call("leave", worker=FIRST)
    assert not first.recall(FIRST).result(15)["lease"]


def test_the_trainer_waits_for_an_engine_that_still_starts_and_not_for_one_that_has_ended(
    run: Run, sides: list[Side]
) -> None:
    trainer, first, second = sides
    trainer.call("start", step=0)
    assert first.lease(FIRST).result(15)["lease"]
    assert second.lease(SECOND).result(15)["lease"], "it starts, and says nothing for a while"
    generate(run, first, FIRST)
    sleeps = first.lease(FIRST)
    batch = trainer.ask("next", step=1, wait=10.0)
    assert waits(batch)
    second.call("leave", worker=SECOND)
    assert batch.result(15)["path"]
    again = second.lease(SECOND)
    assert waits(again), "started anew, it waits before it loads its model"
    trainer.call("published", version=1)
    assert again.result(15)["lease"]
    assert sleeps.result(15)["lease"]


def test_a_worker_that_is_given_up_holds_nobody_back(
    run: Run, sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though what its agent told the controller got lost."""
    monkeypatch.setattr(api, "RENEW_S", 0.1)
    trainer, first, second = sides
    trainer.call("start", step=0)
    assert first.lease(FIRST).result(15)["lease"]
    assert second.lease(SECOND).result(15)["lease"]
    generate(run, first, FIRST)
    first.lease(FIRST)
    batch = trainer.ask("next", step=1, wait=20.0)
    assert waits(batch)
    StatusWriter(run, SECOND, 1).write(f"{GIVEN_UP}: it cannot load its model")
    assert batch.result(25)["path"]


def test_who_asks_sleeps_though_the_answer_got_lost(run: Run, sides: list[Side]) -> None:
    trainer, first, _ = sides
    trainer.call("start", step=0)
    assert first.lease(FIRST).result(15)["lease"]
    generate(run, first, FIRST)
    first.lease(FIRST)
    assert trainer.call("next", step=1)["path"]
    trainer.call("published", version=1)
    assert first.lease(FIRST).result(15)["lease"], "asked once more"


def test_nobody_waits_for_a_turn_when_the_run_stops(run: Run, sides: list[Side]) -> None:
    asked = sides[1].lease(FIRST)
    assert waits(asked)
    write_json(run.stop, {"attempt": 1, "reason": "finished"})
    assert asked.result(15) == {"stop": "finished", "version": None, "lease": False}


def test_a_request_of_a_process_that_has_ended_gives_nobody_a_turn() -> None:
    turns = GpuLease()
    old = turns.ask(FIRST)
    turns.leave(FIRST)
    assert not turns.grant(FIRST, old)
    new = turns.ask(FIRST)
    assert not turns.grant(FIRST, old)
    assert turns.awake == set()
    assert turns.grant(FIRST, new)
    assert turns.awake == {FIRST}
