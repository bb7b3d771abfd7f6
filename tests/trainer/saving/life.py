"""What the tests of saving run in their ranks (tests/trainer/ranks.py): a disk that fails one rank, and checkpoints that are written while training goes on."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hpcrl import faults as fault
from hpcrl.errors import CommitError, RunError
from hpcrl.rundir import commit
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.commit import committed, read_json, verify
from hpcrl.rundir.layout import Run, step_of
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.checkpoint import Checkpoints
from hpcrl.trainer.saving.committer import CheckpointContent, Committer
from hpcrl.trainer.saving.publish import Publisher
from hpcrl.types import Batch
from tests.trainer.scenarios import make_engine, train_steps


@contextmanager
def failing(world: World, rank: int, wanted: str) -> Iterator[None]:
    """Set fault points on one rank."""
    if world.rank == rank:
        os.environ["HPCRL_FAULT"] = wanted
        fault._passed.clear()
    yield
    os.environ.pop("HPCRL_FAULT", None)


class Life:
    """A training that saves each step in one way, and what came of it."""

    def __init__(self, world: World, options: dict[str, Any], name: str, **how: Any) -> None:
        self.run, self.world = Run(Path(options["out"]).parent / name), world
        self.engine, self.committed = make_engine(world, options["model"], {}), list[int]()
        self._source, self._micro = Run.open(options["run"]), {"micro": 2}
        self.checkpoints = Checkpoints(
            self.run, 1, world, keep=Retention(), seed=0, on_commit=self.committed.append, **how
        )
        self.checkpoints.resume(self.engine, None, "latest", None)

    def batch(self, step: int) -> Batch:
        return Batch.from_json(read_json(self._source.batch(step)))

    def train(self, step: int) -> None:
        train_steps(self.engine, self._source, range(step, step + 1), self._micro)

    def save(self, step: int) -> str:
        return self._tried(lambda: self.checkpoints.save(self.engine, None, self.batch(step), {}))

    def finish(self, step: int) -> str:
        return self._tried(lambda: self.checkpoints.finish(self.engine, None, self.batch(step), {}))

    def settle(self) -> str:
        return self._tried(lambda: self.checkpoints.settle(wait=True))

    def _tried(self, what: Any) -> str:
        try:
            what()
        except CommitError as error:
            return str(error)
        return "ok"

    @property
    def there(self) -> list[Any]:
        self.world.barrier()  # the first rank tidies up
        found = [
            committed(self.run.checkpoints, step_of),
            list(self.committed),
            len(list(self.run.checkpoints.glob(".*"))),
        ]
        self.world.barrier()
        return found


def one_rank_fails(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """In the foreground; the second rank has no space, then the first one cannot write the manifest."""
    found = {}
    goes_on = Life(world, options, "goes-on", on_error="continue")
    for rank, point in enumerate(["commit.manifest:raise=EIO", "commit.shard:raise=ENOSPC"]):
        with failing(world, rank, point):
            found[point] = [goes_on.save(1), *goes_on.there]
    found["next"] = [goes_on.save(2), *goes_on.there]
    with failing(world, 1, "commit.shard:raise=EDQUOT"):
        found["last"] = [goes_on.finish(3), *goes_on.there]
    stops = Life(world, options, "stops")
    with failing(world, 1, "commit.shard:raise=ENOSPC"):
        found["stop"] = [stops.save(1), *stops.there]
    return found


def behind(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Saved in the background while training goes on: what is written is the state of then."""
    found = {}
    life = Life(world, options, "behind", mode="async")
    life.train(1)
    committer = life.checkpoints._behind
    assert committer is not None
    gate, fence = threading.Event(), committer.fence

    def waits() -> None:
        assert gate.wait(120)
        fence()

    committer.fence = waits
    found["saved"] = [life.save(1), list(life.committed)]
    life.train(2)
    found["polled"] = [life.checkpoints.settle(), list(life.committed)]
    gate.set()
    found["second"] = [life.save(2), list(life.committed)]  # waits for the first one
    times = life.checkpoints.settle(wait=True)
    found["behind"] = [times["timing/save_checkpoints_behind"], list(life.committed)]
    found["held"] = [life.finish(2), *life.there]
    life.train(3)
    with failing(world, 1, "commit.shard:raise=ENOSPC"):
        life.save(3)
        found["failed"] = [life.settle(), *life.there]
        life.save(3)
        found["made up for"] = [life.finish(3), *life.there]
    ended = Life(world, options, "ended", mode="async")
    ended.train(1)
    ended.save(1)

    def fails() -> None:
        with ended.checkpoints.settled_on_error():
            raise CommitError("the export could not be written")

    found["ended"] = [ended._tried(fails), *ended.there]
    return found


def published(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Each rank writes its part of the weights, unless it cannot, or the first one cannot commit."""
    life, found = Life(world, options, "published"), {}
    publisher = Publisher(life.run, 1, world, torch.float32, kept_versions=2, longest=20)
    metrics = publisher.publish(life.engine, 1)
    found["metrics"] = sorted(metrics)
    for rank, point in enumerate(["weights.manifest:raise=EIO", "weights.shard:raise=ENOSPC"]):
        with failing(world, rank, point):
            said = life._tried(lambda: publisher.publish(life.engine, 2))
        world.barrier()
        found[point] = [said, sorted(path.name for path in life.run.weights.iterdir())]
        world.barrier()
    return found


def full(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """A real filesystem that is too small for a second checkpoint."""
    found = {}
    for name in ("sync", "async"):
        life = Life(world, options, f"full-{name}", mode=name)
        found[f"{name} 1"] = [life.save(1), life.settle()]
        for committer in filter(None, (life.checkpoints._committer, life.checkpoints._behind)):
            committer.expect(None)  # nothing is known of the size: the disk itself says no
        outcome = life.save(2)
        found[f"{name} 2"] = [life.settle() if outcome == "ok" else outcome, *life.there]
    return found


def passing_names(world: World, options: dict[str, Any]) -> list[str]:
    """One rank still writes under a name that will not stay, when the other has written; return the files of the manifest."""
    run, seen = Run(Path(options["out"]).parent / "passing"), Path(options["out"]).with_suffix(".seen")

    def more(directory: Path) -> None:
        passing = directory / ".tmpAbCdEf"
        if world.rank == 1:
            passing.touch()
            _await(seen)
            time.sleep(0.5)
            passing.unlink()
        else:
            _await(passing)
            seen.touch()

    target = run.checkpoint(1)
    Committer(run, 1, world, Retention()).commit(CheckpointContent(target, {}, {}, {"step": 1}, more))
    return sorted(verify(target)["files"])


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def together(world: World, options: dict[str, Any]) -> None:
    found = {
        "one rank fails": one_rank_fails(world, options),
        "behind": behind(world, options),
        "passing names": passing_names(world, options),
        "published": published(world, options),
    }
    if options["full"]:
        found["full"] = full(world, options)
    Path(options["out"]).with_suffix(f".{world.rank}").write_text(json.dumps(found))


def finding(world: World, options: dict[str, Any]) -> None:
    """Tell which checkpoint each rank is to start from, and which files it hashed for that."""
    hashed, real = list[str](), commit.checksum

    def noted(path: Path) -> str:
        hashed.append(str(path.relative_to(options["run"])))
        return real(path)

    commit.checksum = noted
    try:
        found = Checkpoints(Run(Path(options["run"])), 2, world, keep=Retention(), seed=0).find("latest", None)
    except RunError as error:
        found = error
    finally:
        commit.checksum = real
    Path(f"{options['out']}.{world.rank}").write_text(json.dumps([str(found), sorted(hashed)]))
