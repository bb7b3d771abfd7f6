"""Checkpoints: everything that makes a resumed run continue as if it had never stopped, committed as one directory.

    checkpoints/s000040/
      .metadata, __<rank>_0.distcp     model, optimizer and its step count, written by the engine (hpcrl/trainer/backends/shards.py)
      critic/                          the same of the critic, where there is one, beside the policy or on ranks of its own
      rng-<rank>.safetensors           random state of each rank
      reference/                       the reference, once it has followed the policy
      batch.json, batch-<rank>…        the unfinished batch, where the name is one like s000041u2 (hpcrl/trainer/saving/mid_batch.py)
      manifest.json                    step, updates, batch, cursor, layout; sizes and checksums of the files above
      COMMIT

All ranks write and verify, rank 0 commits. Only rank 0 looks for checkpoints: network filesystems may show each node something else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.errors import CommitError, HpcrlError
from hpcrl.rundir.checkpoints import NEVER_DELETED, Retention, set_aside_after
from hpcrl.rundir.commit import committed_by
from hpcrl.rundir.layout import Run
from hpcrl.rundir.space import explained
from hpcrl.rundir.starts import note
from hpcrl.trainer.backends.base import ModelEngine
from hpcrl.trainer.distributed import World
from hpcrl.trainer.rng import random_state
from hpcrl.trainer.saving.committer import CheckpointContent, Committer
from hpcrl.trainer.saving.mid_batch import PartialBatch, unusable
from hpcrl.trainer.saving.resume import (
    CRITIC,
    ResumePoint,
    find_checkpoint,
    load_checkpoint,
    log_skipped,
    verified_by_ranks,
)
from hpcrl.types import Batch

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run, seen from all its trainer ranks.

    Args:
        keep: which ones stay.
        seed: of the run; random states are derived from it where the saved ones do not fit.
        mode: sync: `save` returns once all is committed; async: once it is copied to host memory.
        on_error: whether training ends or goes on when one cannot be written.
        on_commit: called on every rank with the step of each checkpoint once it is committed.
        unusable: returns why training cannot continue from a checkpoint that is whole; None: it can.
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
        on_commit: Callable[[int], None] = lambda _: None,
        unusable: Callable[[Path], str | None] = lambda _: None,
    ) -> None:
        self._run, self._attempt, self._world, self._seed = run, attempt, world, seed
        self._committer = Committer(run, attempt, world, keep)
        self._behind = self._committer.with_new_group() if mode == "async" else None
        self._background: _BackgroundCommit | None = None
        self._stops, self._on_commit, self._unusable = on_error == "stop", on_commit, unusable
        self._newest: Path | None = None
        if world.first and 0 <= keep.newest < NEVER_DELETED:
            log.warning(
                "trainer.max_ckpts_to_keep = %d: the newest %d are kept all the same", keep.newest, NEVER_DELETED
            )

    @classmethod
    def of(
        cls, trainer: TrainerConfig, run: Run, attempt: int, world: World, on_commit: Callable[[int], None]
    ) -> Checkpoints:
        """Return those of a run with this configuration."""
        keep, mode, on_error = Retention.of(trainer), trainer.ckpt_mode, trainer.ckpt_on_error
        why = partial(unusable, run, trainer)
        return cls(
            run,
            attempt,
            world,
            keep=keep,
            seed=trainer.seed,
            mode=mode,
            on_error=on_error,
            on_commit=on_commit,
            unusable=why,
        )

    def resume(self, engine: ModelEngine, critic: ModelEngine | None, mode: str, path: str | None) -> ResumePoint:
        """Bring the engines to where training continues, and return where that is.

        A fresh start is step 0 without extra state. Args and errors as in `find`.
        """
        found = self.find(mode, path)
        if found is not None and found.parent == self._run.checkpoints:
            self._world.rank0_broadcast(lambda: self._loads(found))
        start = self.load(engine, critic, found)
        self._world.barrier()  # every rank has loaded it
        self._world.rank0_broadcast(lambda: self._started(found))
        self._newest = found
        return start

    def _loads(self, found: Path) -> None:
        with explained(self._run.starts):
            note(self._run, {"attempt": self._attempt, "loads": found.name, "by": committed_by(found)})

    def _started(self, found: Path | None) -> None:
        with explained(self._run.checkpoints):
            set_aside_after(self._run, self._attempt, found, self._committer.fence, log_skipped)
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
        run, attempt, fence = self._run, self._attempt, self._committer.fence
        look = partial(find_checkpoint, run, attempt, mode, path, self._unusable, fence)
        return verified_by_ranks(self._world, look)

    def load(self, engine: ModelEngine, critic: ModelEngine | None, checkpoint: Path | None) -> ResumePoint:
        """Bring the engines, and what is drawn at random, to a checkpoint or, where it is None, to step 0; nothing is written."""
        start = load_checkpoint(engine, critic, checkpoint, self._world, self._seed)
        for committer in filter(None, (self._committer, self._behind)):
            committer.expect(start.size)
        return start

    def save(
        self, engine: ModelEngine, critic: ModelEngine | None, batch: Batch, extra_state: dict[str, float]
    ) -> dict[str, float]:
        """Save the state after `batch` was trained; one that is still being written is waited for. Return metrics as `settle`.

        Args:
            extra_state: numbers beside the engines' state, the same on every rank.

        Raises:
            CommitError: this one, or the one before, could not be written, and training is to end for that.
        """
        before = self.settle(wait=True)
        content = self._content(engine, critic, batch, extra_state, copied=self._behind is not None)
        if self._behind is not None:
            self._background = _BackgroundCommit(self._behind, content, self._world.device)
            return before
        error = _try_commit(self._committer, content)
        self._conclude(content, error)
        return {} if error else self._size()

    def settle(self, wait: bool = False, last: bool = False) -> dict[str, float]:
        """Collect a checkpoint that was written in the background; return its seconds and size, as metrics.

        All ranks call it between steps.

        Args:
            wait: until it is written.
            last: training ends, and `finish` makes up for one that could not be written.

        Raises:
            CommitError: it could not be written, and training is to end for that.
        """
        background = self._background
        if background is None:
            return {}
        if wait:
            background.join()
        if background.crash is not None:
            raise background.crash
        if self._world.any_rank(background.is_alive()):
            return {}
        self._background = None
        self._committer.expect(background.committer.size)
        self._conclude(background.content, background.error, go_on=last)
        return {"timing/save_checkpoints_behind": background.seconds} | ({} if background.error else self._size())

    @contextmanager
    def settled_on_error(self) -> Iterator[None]:
        """Wait for a checkpoint that is being written before an error, the same on every rank, ends the attempt."""
        try:
            yield
        except HpcrlError:
            self.settle(wait=True)
            raise

    def _size(self) -> dict[str, float]:
        return {"throughput/checkpoint_gib": (self._committer.size or 0) / 2**30}

    def finish(
        self,
        engine: ModelEngine,
        critic: ModelEngine | None,
        batch: Batch,
        extra_state: dict[str, float],
        inside: PartialBatch | None = None,
    ) -> dict[str, float]:
        """Make sure that the state after `batch`, the last one, is committed; return metrics as `settle`.

        Args:
            inside: where not all optimizer steps of `batch` are made.

        Raises:
            CommitError: it is not, whatever training is to do about others.
        """
        times = self.settle(wait=True, last=True)
        content = self._content(engine, critic, batch, extra_state, copied=False, inside=inside)
        if self._newest != content.target:
            self._committer.commit(content)
            self._conclude(content, None)
            times |= {} if inside else self._size()  # the one at the end of the step before may have set its own
        return times

    def _conclude(self, content: CheckpointContent, error: CommitError | None, *, go_on: bool = False) -> None:
        if error is None:
            self._newest = content.target
            self._on_commit(content.facts["step"])
            return
        self._world.rank0_broadcast(self._committer.fence)  # where a newer attempt has begun, this one ends
        if self._stops and not go_on:
            raise error
        if self._world.first:
            log.warning("training goes on without this checkpoint: %s", error)

    def _content(
        self,
        engine: ModelEngine,
        critic: ModelEngine | None,
        batch: Batch,
        extra_state: dict[str, float],
        *,
        copied: bool,
        inside: PartialBatch | None = None,
    ) -> CheckpointContent:
        engines = {"": engine} | ({} if critic is None else {CRITIC: critic})
        step, updates = (batch.step, 0) if inside is None else (batch.step - 1, inside.updates)
        facts = {
            "step": step,
            "updates": updates,
            "cursor": batch.cursor,
            "world_size": self._world.size,
            "seed": self._seed,
            "carried": extra_state,
            "batch": str(self._run.batch(batch.step).relative_to(self._run.path)),
            "torch": str(torch.__version__),
        }
        writers = {folder: each.snapshot() if copied else each.save for folder, each in engines.items()}
        content = CheckpointContent(
            self._run.checkpoint(step, updates), writers, random_state(self._world.device), facts
        )
        return content if inside is None else replace(content, more=inside.write)


class _BackgroundCommit(threading.Thread):
    """Commits one checkpoint while training goes on.

    Attributes:
        error: why it could not be written, the same on every rank.
        crash: anything else that was raised on this rank.
    """

    def __init__(self, committer: Committer, content: CheckpointContent, device: torch.device) -> None:
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
            self.error = _try_commit(self.committer, self.content)
        except BaseException as crash:  # noqa: BLE001 - the training thread raises it
            self.crash = crash
        self.seconds = time.monotonic() - began


def _try_commit(committer: Committer, content: CheckpointContent) -> CommitError | None:
    try:
        committer.commit(content)
    except CommitError as error:
        return error
    return None
