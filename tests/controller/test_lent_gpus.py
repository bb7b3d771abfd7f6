"""Leases of the trainer's GPUs over HTTP: the trainer leaves them where that pays, engines wake, and the batch waits until all of them sleep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.types import Work
from tests.controller.test_api import SCHEDULE, end, finish, make_run, serve_attempt, work_of
from tests.controller.test_gpu_lease import FIRST, SECOND, Side, waits

LENDING = replace(SCHEDULE, batch_size=4, staleness=1, total_steps=20, eval_interval=0, lent=(SECOND,))
APART = 4
"""Steps without leases that are measured first, with the one that begins before a replica is there."""


class Sides:
    """Trainer, a worker with a GPU of its own and room for two groups, and one that waits for the trainer's."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.trainer, self.own, self.lent, self.holder = (Side(run) for _ in range(4))
        self.version = 0

    def claim(self, side: Side, name: str, capacity: int = 2, holding: list[Work] | None = None) -> list[Work]:
        held = [item.group_id for item in holding or []]
        answer = side.ask("claim", worker=name, version=self.version, capacity=capacity, holding=held)
        return work_of(answer.result(15))

    def finish(self, side: Side, name: str, work: list[Work]) -> None:
        groups = [finish(self._run, item, self.version).to_json() for item in work]
        side.call("complete", worker=name, groups=groups)

    def next(self, *, away: bool = False, wait: float = 5.0) -> Future[dict[str, Any]]:
        return self.trainer.ask("next", step=self.version + 1, wait=wait, away=away)

    def trained(self) -> None:
        self.version += 1
        self.trainer.call("published", version=self.version)

    def step_apart(self) -> None:
        """One step of which the trainer waits for the groups of the first worker."""
        asked = self.next()
        for _ in range(2):
            work = self.claim(self.own, FIRST)
            time.sleep(0.2)
            self.finish(self.own, FIRST, work)
        assert asked.result(15)["path"]
        self.trained()

    def borrow(self) -> list[Work]:
        """Steps until the trainer leaves its GPUs and the engine has the lease; return the groups of the first worker."""
        for _ in range(APART):
            self.step_apart()
        asleep = self.lent.lease(SECOND)
        work = self.claim(self.own, FIRST)
        assert waits(asleep)
        asked = self.next(wait=60.0)
        assert asked.result(30) == {"stop": None, "path": None, "lend": True}, "as soon as it asks"
        assert not asleep.done(), "its GPUs are not free yet"
        waiting = self.next(away=True, wait=0.5)
        assert asleep.result(15)["lease"]
        assert waiting.result(15) == {"stop": None, "path": None, "lend": False}
        return work

    def close(self) -> None:
        for side in (self.trainer, self.own, self.lent, self.holder):
            side.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = make_run(tmp_path / "project" / "run")
    served = serve_attempt(run, 1, LENDING)
    yield run
    end(run, 1, served, LENDING.total_steps)


@pytest.fixture
def sides(run: Run) -> Iterator[Sides]:
    sides = Sides(run)
    sides.trainer.call("start", step=0)
    yield sides
    write_json(run.stop, {"attempt": 1, "reason": "finished"})  # which answers what they still ask
    sides.close()


def test_the_batch_comes_when_the_lent_engine_sleeps(sides: Sides) -> None:
    own = sides.borrow()
    borrowed = sides.claim(sides.lent, SECOND)
    assert len(borrowed) == 2
    holds = sides.holder.recall(SECOND)
    batch = sides.next(away=True)
    sides.finish(sides.own, FIRST, own)
    others = sides.claim(sides.own, FIRST)
    assert waits(holds), "the trainer waits, and it has groups"
    sides.finish(sides.own, FIRST, others)
    assert not holds.result(15)["lease"], "the batch is there"
    assert waits(batch), "it is awake"
    asleep = sides.lent.lease(SECOND)
    assert batch.result(15)["path"] == "batches/s000005.json"
    assert waits(asleep)
    sides.trained()
    assert waits(asleep), "the trainer has its GPUs"


@pytest.mark.faults_slow
def test_a_batch_that_lacks_what_a_sleeping_engine_has_begun_wakes_it(sides: Sides) -> None:
    """Though nothing else is left for it to do. It goes on with what it has, under the version that is there then."""
    own = sides.borrow()
    borrowed = sides.claim(sides.lent, SECOND)
    sides.finish(sides.own, FIRST, own)
    sides.finish(sides.own, FIRST, sides.claim(sides.own, FIRST))
    asleep = sides.lent.lease(SECOND)
    assert sides.next(away=True).result(15)["path"]
    sides.trained()
    sides.finish(sides.own, FIRST, sides.claim(sides.own, FIRST))
    sides.own.call("leave", worker=FIRST)
    # two groups of version 4 must train in step 6, and the room for others is taken by nobody
    assert sides.next().result(15)["lend"]
    batch = sides.next(away=True, wait=15.0)
    assert asleep.result(15)["lease"]
    sides.finish(sides.lent, SECOND, borrowed)
    sides.lent.lease(SECOND)
    assert batch.result(15)["path"]


def test_a_lent_engine_that_dies_keeps_neither_gpus_nor_groups(sides: Sides) -> None:
    own = sides.borrow()
    borrowed = sides.claim(sides.lent, SECOND)
    sides.finish(sides.own, FIRST, own)
    sides.finish(sides.own, FIRST, sides.claim(sides.own, FIRST))
    batch = sides.next(away=True)
    assert waits(batch)
    sides.lent.call("leave", worker=SECOND)
    assert batch.result(15)["path"]
    sides.trained()
    assert {item.group_id for item in borrowed} <= {item.group_id for item in sides.claim(sides.own, FIRST, capacity=4)}


@pytest.mark.faults_slow
def test_an_engine_without_groups_sleeps_before_the_batch_is_there(sides: Sides) -> None:
    own = sides.borrow()
    borrowed = sides.claim(sides.lent, SECOND)
    own += sides.claim(sides.own, FIRST, capacity=8, holding=own)
    assert len(own) + len(borrowed) == 8, "two batches are under way, and no more may be"
    sides.finish(sides.lent, SECOND, borrowed)
    holds = sides.holder.recall(SECOND)
    assert waits(holds)
    claimed = sides.lent.ask("claim", worker=SECOND, version=sides.version, capacity=2, holding=[])
    assert not holds.result(15)["lease"]
    assert not claimed.result(15)["work"]
