"""Checkpoints: everything that makes a resumed run continue as if it had never stopped, committed as one directory.

    checkpoints/s000040/
      .metadata, __<rank>_0.distcp     model, optimizer and its step count, written by the engine
      critic/                          the same of the critic, where there is one
      rng-<rank>.safetensors           random state of each rank
      reference/                       the reference, once it has followed the policy
      batch.json, batch-<rank>…        the unfinished batch, where the name is one like s000041u2 (hpcrl/trainer/midstep.py)
      manifest.json                    step, updates, batch, cursor, layout; sizes and checksums of the files above
      COMMIT

All ranks write, rank 0 commits. Only rank 0 looks for checkpoints: network filesystems may show each node something else.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from hpcrl.config.trainer import TrainerConfig
from hpcrl.errors import CommitError, RunError
from hpcrl.run.checkpoints import NEVER_DELETED, Retention, newest_usable, set_aside_after, size_of, steps_left
from hpcrl.run.commit import committed_by, verify
from hpcrl.run.layout import Run, step_of
from hpcrl.run.space import explained
from hpcrl.run.starts import note
from hpcrl.trainer.committer import Committer, Content, rng_file
from hpcrl.trainer.engine import Engine, Writer
from hpcrl.trainer.midstep import Unfinished, unfit
from hpcrl.trainer.random_state import random_state, set_random_state
from hpcrl.trainer.world import World
from hpcrl.types import Batch

log = logging.getLogger(__name__)

_CRITIC = "critic"


class Start(NamedTuple):
    """Where training continues.

    Attributes:
        step: the last one that is complete.
        updates: optimizer steps of the next one that are made.
        carried: what `save` was given to carry.
        checkpoint: of this run or another's; None: training begins.
    """

    step: int = 0
    updates: int = 0
    carried: dict[str, float] = {}
    checkpoint: Path | None = None

    @property
    def inside(self) -> Path | None:
        """The checkpoint that was saved inside the next step, if it was."""
        return self.checkpoint if self.updates else None


class Checkpoints:
    """The checkpoints of one run, seen from all its trainer ranks.

    Args:
        keep: which ones stay.
        seed: of the run; random states are derived from it where the saved ones do not fit.
        mode: sync: `save` returns once all is committed; async: once it is copied to host memory.
        on_error: whether training ends or goes on when one cannot be written.
        told: called on every rank with the step of each checkpoint once it is committed.
        unfit: tells why training cannot go on from a checkpoint, though it is whole; None: it can.
    """

    def __init__(
        self,
        run: Run,
        attempt: int,
        world: World,
        *,
        keep: Retention,
        seed: int,
        mode: Literal["sync", "async"] = "sync",
        on_error: Literal["stop", "continue"] = "stop",
        told: Callable[[int], None] = lambda _: None,
        unfit: Callable[[Path], str | None] = lambda _: None,
    ) -> None:
        self._run, self._attempt, self._world, self._seed = run, attempt, world, seed
        self._committer = Committer(run, attempt, world, keep)
        self._behind = self._committer.beside() if mode == "async" else None
        self._flight: _Flight | None = None
        self._stops, self._told, self._unfit = on_error == "stop", told, unfit
        self._newest: Path | None = None
        if world.first and 0 <= keep.newest < NEVER_DELETED:
            log.warning(
                "trainer.max_ckpts_to_keep = %d: the newest %d are kept all the same", keep.newest, NEVER_DELETED
            )

    @classmethod
    def of(
        cls, trainer: TrainerConfig, run: Run, attempt: int, world: World, told: Callable[[int], None]
    ) -> Checkpoints:
        """Return those of a run with this configuration."""
        keep, mode, on_error = Retention.of(trainer), trainer.ckpt_mode, trainer.ckpt_on_error
        fits = partial(unfit, run, trainer)
        return cls(
            run, attempt, world, keep=keep, seed=trainer.seed, mode=mode, on_error=on_error, told=told, unfit=fits
        )

    def resume(self, engine: Engine, critic: Engine | None, mode: str, path: str | None) -> Start:
        """Bring the engines to where training continues, and return where that is.

        A fresh start is step 0 and carries nothing. Args and errors as in `find`.
        """
        found = self.find(mode, path)
        if found is not None and found.parent == self._run.checkpoints:
            self._world.look(lambda: self._loads(found))
        start = self.load(engine, critic, found)
        self._world.barrier()  # every rank has loaded it
        self._world.look(lambda: self._started(found))
        self._newest = found
        return start

    def _loads(self, found: Path) -> None:
        with explained(self._run.starts):
            note(self._run, {"attempt": self._attempt, "loads": found.name, "by": committed_by(found)})

    def _started(self, found: Path | None) -> None:
        with explained(self._run.checkpoints):
            set_aside_after(self._run, self._attempt, found, self._committer.fence, _skipped)
            note(self._run, {"attempt": self._attempt, "from": found.name if found else None})

    def find(self, mode: str, path: str | None) -> Path | None:
        """Return the checkpoint to start from, the same on every rank, or None to start at step 0.

        A later attempt of a run goes on with the run's own checkpoints, also where the first one started from another run's.

        Args:
            mode: latest, none (always step 0) or from_path.
            path: checkpoint directory for from_path.

        Raises:
            RunError: `path` names no checkpoint, or there are checkpoints and none of them is whole.
            CommitError: the checkpoint at `path` is not complete.
        """
        found = self._world.look(lambda: str(self._look(mode, path) or ""))
        return Path(found) if found else None

    def _look(self, mode: str, path: str | None) -> Path | None:
        if mode == "none":
            return None
        with explained(self._run.checkpoints):
            own = newest_usable(self._run, self._attempt, _skipped, self._unfit, self._committer.fence)
        if own is not None:
            return own
        if damaged := steps_left(self._run):
            raise RunError(
                f"{self._run.checkpoints} has checkpoints of steps {damaged}, but none of them is whole any more. Restore "
                "one, or submit a new run"
            )
        return _foreign(path) if mode == "from_path" else None

    def load(self, engine: Engine, critic: Engine | None, checkpoint: Path | None) -> Start:
        """Bring the engines, and what is drawn at random, to a checkpoint or, where it is None, to step 0; nothing is written.

        Raises:
            RunError: there is a critic, and the checkpoint has none.
            CommitError: it cannot be loaded.
        """
        self._seed_rng(0)
        return Start() if checkpoint is None else self._restore(engine, critic, checkpoint)

    def _restore(self, engine: Engine, critic: Engine | None, checkpoint: Path) -> Start:
        facts = self._world.look(lambda: verify(checkpoint, checksums=False))
        saved = any(name.startswith(f"{_CRITIC}/") for name in facts["files"])
        if critic is not None and not saved:
            raise RunError(
                f"{checkpoint} was saved without a critic: leave out trainer.critic.model.path, or submit a new run whose "
                "trainer.policy.model.path is an export of the run that saved it"
            )
        try:
            engine.restore(checkpoint)
            if critic is not None:
                critic.restore(checkpoint / _CRITIC)
        except CheckpointException as error:
            raise CommitError(f"{checkpoint} cannot be loaded: {error}") from error
        if critic is None and saved and self._world.first:
            log.warning("%s has a critic, which this run does not train", checkpoint)
        self._restore_rng(checkpoint, facts)
        for committer in filter(None, (self._committer, self._behind)):
            committer.expect(size_of(facts))
        updates = facts.get("updates", 0)
        if self._world.first:
            inside = f" and {updates} optimizer steps of the next" if updates else ""
            log.info("continuing after step %d%s, from %s", facts["step"], inside, checkpoint)
        return Start(facts["step"], updates, facts.get("carried", {}), checkpoint)

    def _restore_rng(self, checkpoint: Path, facts: dict[str, Any]) -> None:
        rank, file = self._world.rank, rng_file(checkpoint, self._world.rank)
        if facts["world_size"] == self._world.size:
            set_random_state(load_file(file), self._world.device)
            return
        self._seed_rng(facts["step"])
        log.warning(
            "rank %d: %d ranks saved this checkpoint and %d load it; random state derived anew from seed, step and rank",
            rank,
            facts["world_size"],
            self._world.size,
        )

    def _seed_rng(self, step: int) -> None:
        text = f"{self._seed}/{step}/{self._world.rank}"
        torch.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()))

    def save(self, engine: Engine, critic: Engine | None, batch: Batch, carried: dict[str, float]) -> None:
        """Save the state after `batch` was trained; one that is still being written is waited for.

        Args:
            carried: numbers beside the engines' state, the same on every rank.

        Raises:
            CommitError: this one, or the one before, could not be written, and training is to end for that.
        """
        self.settle(wait=True)
        content = self._content(engine, critic, batch, carried, copied=self._behind is not None)
        if self._behind is not None:
            self._flight = _Flight(self._behind, content, self._world.device)
        else:
            self._conclude(content, _attempted(self._committer, content))

    def settle(self, wait: bool = False, last: bool = False) -> dict[str, float]:
        """Take note of a checkpoint that was written in the background; return how long that took, as metrics.

        All ranks call it between steps.

        Args:
            wait: until it is written.
            last: training ends, and `finish` makes up for one that could not be written.

        Raises:
            CommitError: it could not be written, and training is to end for that.
        """
        flight = self._flight
        if flight is None:
            return {}
        if wait:
            flight.join()
        if flight.crash is not None:
            raise flight.crash
        if self._world.any(flight.is_alive()):
            return {}
        self._flight = None
        self._committer.expect(flight.committer.size)
        self._conclude(flight.content, flight.error, go_on=last)
        return {"timing/save_checkpoints_behind": flight.seconds}

    def finish(
        self,
        engine: Engine,
        critic: Engine | None,
        batch: Batch,
        carried: dict[str, float],
        inside: Unfinished | None = None,
    ) -> dict[str, float]:
        """Make sure that the state after `batch`, the last one, is committed; return metrics as `settle`.

        Args:
            inside: where not all optimizer steps of `batch` are made.

        Raises:
            CommitError: it is not, whatever training is to do about others.
        """
        times = self.settle(wait=True, last=True)
        content = self._content(engine, critic, batch, carried, copied=False, inside=inside)
        if self._newest != content.target:
            self._committer.commit(content)
            self._conclude(content, None)
        return times

    def _conclude(self, content: Content, error: CommitError | None, *, go_on: bool = False) -> None:
        if error is None:
            self._newest = content.target
            self._told(content.facts["step"])
            return
        self._world.look(self._committer.fence)  # where a newer attempt has begun, this one ends
        if self._stops and not go_on:
            raise error
        if self._world.first:
            log.warning("training goes on without this checkpoint: %s", error)

    def _content(
        self,
        engine: Engine,
        critic: Engine | None,
        batch: Batch,
        carried: dict[str, float],
        *,
        copied: bool,
        inside: Unfinished | None = None,
    ) -> Content:
        engines = {"": engine} | ({} if critic is None else {_CRITIC: critic})
        step, updates = (batch.step, 0) if inside is None else (batch.step - 1, inside.updates)
        facts = {
            "step": step,
            "updates": updates,
            "cursor": batch.cursor,
            "world_size": self._world.size,
            "seed": self._seed,
            "carried": carried,
            "batch": str(self._run.batch(batch.step).relative_to(self._run.path)),
            "torch": str(torch.__version__),
        }
        writers = {folder: each.snapshot() if copied else _writer(each) for folder, each in engines.items()}
        content = Content(self._run.checkpoint(step, updates), writers, random_state(self._world.device), facts)
        return content if inside is None else replace(content, more=inside.write)


class _Flight(threading.Thread):
    """Commits one checkpoint while training goes on.

    Attributes:
        error: why it could not be written, the same on every rank.
        crash: anything else that was raised on this rank.
    """

    def __init__(self, committer: Committer, content: Content, device: torch.device) -> None:
        super().__init__(name="checkpoint", daemon=True)  # a process that fails does not wait for it
        self.content, self.committer, self._device = content, committer, device
        self.error: CommitError | None = None
        self.crash: BaseException | None = None
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self.error = _attempted(self.committer, self.content)
        except BaseException as crash:  # noqa: BLE001 - the training thread raises it
            self.crash = crash
        self.seconds = time.monotonic() - began


def _attempted(committer: Committer, content: Content) -> CommitError | None:
    try:
        committer.commit(content)
    except CommitError as error:
        return error
    return None


def _writer(engine: Engine) -> Writer:
    return lambda directory, _: engine.save(directory)


def _skipped(why: str) -> None:
    log.warning("checkpoint skipped: %s", why)


def _foreign(path: str | None) -> Path:
    if path is None:
        raise RunError("trainer.resume_mode is from_path: set trainer.resume_path to a directory checkpoints/sNNNNNN")
    checkpoint = Path(path)
    if step_of(checkpoint) is None or not checkpoint.is_dir():
        raise RunError(
            f"trainer.resume_path: {checkpoint} is not a checkpoint; expected an existing directory named sNNNNNN, such as "
            f"those in a run's checkpoints/"
        )
    verify(checkpoint)
    return checkpoint
