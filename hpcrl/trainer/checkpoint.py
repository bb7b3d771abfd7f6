"""Checkpoints: everything that makes a resumed run continue as if it had never stopped, committed as one directory.

    checkpoints/s000040/
      .metadata, __<rank>_0.distcp     model, optimizer and its step count, written by the engine
      critic/                          the same of the critic, where there is one
      rng-<rank>.safetensors           random state of each rank
      reference/                       the reference, once it has followed the policy
      manifest.json                    step, batch, cursor, layout; sizes and checksums of the files above
      COMMIT

All ranks write, rank 0 commits. Only rank 0 looks for checkpoints: network filesystems may show each node something else.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hpcrl.errors import RunError
from hpcrl.run.commit import begin, committed, discard, finish, newest_committed, staging, verify
from hpcrl.run.layout import Run, step_of
from hpcrl.trainer.engine import Engine
from hpcrl.trainer.world import World
from hpcrl.types import Batch

log = logging.getLogger(__name__)

_CRITIC = "critic"
_NEVER_DELETED = 2  # the newest may turn out to be damaged when it is needed


class Checkpoints:
    """The checkpoints of one run, seen from all its trainer ranks.

    Args:
        keep: newest ones that stay, never fewer than two; negative: all.
        seed: of the run; random states are derived from it where the saved ones do not fit.
    """

    def __init__(self, run: Run, attempt: int, world: World, *, keep: int, seed: int) -> None:
        self._run, self._attempt, self._world, self._seed = run, attempt, world, seed
        self._keep = keep if keep < 0 else max(keep, _NEVER_DELETED)
        if world.first and 0 <= keep < _NEVER_DELETED:
            log.warning("trainer.max_ckpts_to_keep = %d: the newest %d are kept all the same", keep, _NEVER_DELETED)

    def resume(
        self, engine: Engine, critic: Engine | None, mode: str, path: str | None
    ) -> tuple[int, dict[str, float]]:
        """Bring the engines to where training continues; return that step and what `save` was given to carry.

        A fresh start is step 0 and carries nothing. Args and errors as in `find`.
        """
        self._seed_rng(0)
        found = self.find(mode, path)
        step, carried = self.restore(engine, critic, found) if found else (0, {})
        self.set_aside_after(step)
        return step, carried

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
        own = newest_committed(self._run.checkpoints, step_of, lambda why: log.warning("checkpoint skipped: %s", why))
        if own is not None:
            return own
        if damaged := committed(self._run.checkpoints, step_of):
            raise RunError(
                f"{self._run.checkpoints} has checkpoints of steps {damaged}, but none of them is whole any more. Restore "
                "one, or submit a new run"
            )
        return _foreign(path) if mode == "from_path" else None

    def restore(self, engine: Engine, critic: Engine | None, checkpoint: Path) -> tuple[int, dict[str, float]]:
        """Load a checkpoint that `find` gave; return its step and what it carries.

        Raises:
            RunError: there is a critic, and the checkpoint has none.
        """
        facts = self._world.look(lambda: verify(checkpoint, checksums=False))
        saved = any(name.startswith(f"{_CRITIC}/") for name in facts["files"])
        if critic is not None and not saved:
            raise RunError(
                f"{checkpoint} was saved without a critic: leave out trainer.critic.model.path, or submit a new run whose "
                "trainer.policy.model.path is an export of the run that saved it"
            )
        engine.restore(checkpoint)
        if critic is not None:
            critic.restore(checkpoint / _CRITIC)
        elif saved and self._world.first:
            log.warning("%s has a critic, which this run does not train", checkpoint)
        self._restore_rng(checkpoint, facts)
        if self._world.first:
            log.info("continuing after step %d of %s", facts["step"], checkpoint)
        return facts["step"], facts.get("carried", {})

    def _restore_rng(self, checkpoint: Path, facts: dict[str, Any]) -> None:
        rank, file = self._world.rank, _rng_file(checkpoint, self._world.rank)
        if facts["world_size"] == self._world.size:
            states = load_file(file)
            torch.set_rng_state(states["cpu"])
            if self._world.device.type == "cuda" and "cuda" in states:
                torch.cuda.set_rng_state(states["cuda"])
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
        """Commit the state after `batch` was trained. All ranks write; returns on every rank once it is committed.

        Args:
            carried: numbers beside the engines' state, the same on every rank.
        """
        target = self._run.checkpoint(batch.step)
        if self._world.first:
            begin(target, self._attempt)
        self._world.barrier()
        directory = staging(target, self._attempt)
        engine.save(directory)
        if critic is not None:
            (directory / _CRITIC).mkdir(exist_ok=True)
            critic.save(directory / _CRITIC)
        states = {"cpu": torch.get_rng_state()}
        if self._world.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        save_file(states, _rng_file(directory, self._world.rank))
        _sync(_rng_file(directory, self._world.rank))
        self._world.barrier()
        if self._world.first:
            facts = {"step": batch.step, "cursor": batch.cursor, "world_size": self._world.size, "seed": self._seed}
            pointer = self._run.batch(batch.step).relative_to(self._run.path)
            finish(target, self._attempt, **facts, carried=carried, batch=str(pointer), torch=str(torch.__version__))
            self._retire()
        self._world.barrier()

    def _retire(self) -> None:
        if self._keep >= 0:
            for step in committed(self._run.checkpoints, step_of)[: -self._keep]:
                discard(self._run.checkpoint(step))

    def set_aside_after(self, step: int) -> None:
        """Take out of the way what a start at `step` gave up: later checkpoints are renamed, half-written ones removed."""
        if self._world.first and self._run.checkpoints.is_dir():
            for path in list(self._run.checkpoints.iterdir()):
                number = step_of(path)
                if number is not None and number > step:
                    aside = path.with_name(f".given-up-{path.name}.{self._attempt}")
                    log.warning("training starts again after step %d: %s becomes %s", step, path, aside.name)
                    os.rename(path, aside)
                elif path.name.startswith((".tmp-", ".trash-")):
                    discard(path)
        self._world.barrier()


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


def _rng_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"rng-{rank}.safetensors"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
