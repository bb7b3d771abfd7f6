"""Resuming: the choice of a checkpoint, and loading the engines' state and random state from it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from hpcrl.errors import CommitError, RunError
from hpcrl.rundir.checkpoint_index import check_indexes
from hpcrl.rundir.checkpoints import Verify, newest_usable, require_checkpoints, size_of, steps_left
from hpcrl.rundir.commit import verify, verify_checksums
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.space import explained
from hpcrl.rundir.starts import require_starts
from hpcrl.trainer.backends.base import ModelEngine
from hpcrl.trainer.distributed import World
from hpcrl.trainer.rng import set_random_state
from hpcrl.trainer.saving.committer import rng_file

log = logging.getLogger(__name__)

CRITIC = "critic"  # folder of a checkpoint


class ResumePoint(NamedTuple):
    """The point at which training continues.

    Attributes:
        step: the last one that is complete.
        updates: optimizer steps of the next one that are made.
        extra_state: numbers that were saved beside the engines' state.
        checkpoint: of this run or another's; None: training begins.
        size: bytes of the checkpoint, where they are known.
    """

    step: int = 0
    updates: int = 0
    extra_state: dict[str, float] = {}
    checkpoint: Path | None = None
    size: int | None = None

    @property
    def mid_batch(self) -> Path | None:
        """The checkpoint, if it was saved between two optimizer steps of the next step."""
        return self.checkpoint if self.updates else None


def find_checkpoint(
    run: Run,
    attempt: int,
    mode: str,
    path: str | None,
    unusable: Callable[[Path], str | None],
    fence: Callable[[], None],
    verify: Verify,
) -> Path | None:
    """Return the checkpoint that training starts from; None: it starts at step 0. Rank 0 looks: filesystems may show each node another state.

    Args and errors as of `Checkpoints.find` and `newest_usable`.
    """
    if mode == "none":
        return None
    require_starts(run)
    with explained(run.checkpoints):
        own = newest_usable(run, attempt, log_skipped, unusable, fence, verify)
    if own is not None:
        return own
    if damaged := steps_left(run):
        raise RunError(
            f"{run.checkpoints} has checkpoints of steps {damaged}, but none is whole any more. Restore "
            "one, or submit a new run"
        )
    require_checkpoints(run)
    return _from_path(path, verify) if mode == "from_path" else None


def verified_by_ranks(world: World, look: Callable[[Verify], Path | None]) -> Path | None:
    """Return on every rank the checkpoint that `look` finds on rank 0; all ranks hash files of those that it verifies.

    All ranks call it. An error of `look` is raised on every rank.
    """

    def find() -> str:
        try:
            return str(look(lambda path: _verify_with_ranks(path, world)) or "")
        finally:
            world.rank0_broadcast(lambda: None)

    if not world.first:
        while task := world.rank0_broadcast(dict):
            with suppress(CommitError):  # rank 0 decides what follows from it
                _verify_share(Path(task["path"]), task["shares"], world)
    found = world.rank0_broadcast(find)
    return Path(found) if found else None


def _verify_with_ranks(path: Path, world: World) -> None:
    files = verify(path, checksums=False)["files"]
    shares: list[dict[str, Any]] = [{} for _ in range(world.size)]
    sizes = [0] * world.size
    for name in sorted(files, key=lambda name: files[name]["size"], reverse=True):
        least = sizes.index(min(sizes))
        shares[least][name] = files[name]
        sizes[least] += files[name]["size"]
    began = time.monotonic()
    world.rank0_broadcast(lambda: {"path": str(path), "shares": shares})
    _verify_share(path, shares, world)
    check_indexes(path)
    seconds = time.monotonic() - began
    log.info(
        "%s verified by %d ranks: %.2f GB in %.1f s, %.2f GB/s",
        path.name, world.size, sum(sizes) / 1e9, seconds, sum(sizes) / 1e9 / max(seconds, 1e-9),
    )  # fmt: skip


def _verify_share(path: Path, shares: Sequence[Mapping[str, Any]], world: World) -> None:
    world.all_gather(lambda: verify_checksums(path, shares[world.rank]))


def log_skipped(why: str) -> None:
    log.warning("checkpoint skipped: %s", why)


def _from_path(path: str | None, verify: Verify) -> Path:
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


def load_checkpoint(
    engine: ModelEngine, critic: ModelEngine | None, checkpoint: Path | None, world: World, seed: int
) -> ResumePoint:
    """Bring the engines and this rank's random state to a checkpoint or, where it is None, to step 0. All ranks call it; nothing is written.

    Raises:
        RunError: there is a critic, and the checkpoint has none.
        CommitError: it cannot be loaded.
    """
    _seed_rng(seed, 0, world)
    if checkpoint is None:
        return ResumePoint()
    facts = world.rank0_broadcast(lambda: verify(checkpoint, checksums=False))
    saved = any(name.startswith(f"{CRITIC}/") for name in facts["files"])
    if critic is not None and not saved:
        raise RunError(
            f"{checkpoint} was saved without a critic: leave out trainer.critic.model.path, or submit a new run whose "
            "trainer.policy.model.path is an export of the run that saved it"
        )

    def restore() -> None:
        engine.restore(checkpoint)
        if critic is not None:
            critic.restore(checkpoint / CRITIC)

    world.all_gather(restore)  # an error on one rank is raised on all
    if critic is None and saved and world.first:
        log.warning("%s has a critic, which this run does not train", checkpoint)
    _restore_rng(checkpoint, facts, world, seed)
    updates = facts.get("updates", 0)
    if world.first:
        inside = f" and {updates} optimizer steps of the next" if updates else ""
        log.info("continuing after step %d%s, from %s", facts["step"], inside, checkpoint)
    return ResumePoint(facts["step"], updates, facts.get("carried", {}), checkpoint, size_of(facts))


def _restore_rng(checkpoint: Path, facts: dict[str, Any], world: World, seed: int) -> None:
    rank, file = world.rank, rng_file(checkpoint, world.rank)
    if facts["world_size"] == world.size:
        set_random_state(load_file(file), world.device)
        return
    _seed_rng(seed, facts["step"], world)
    log.warning(
        "rank %d: %d ranks saved this checkpoint and %d load it; random state derived from seed, step and rank",
        rank,
        facts["world_size"],
        world.size,
    )


def _seed_rng(seed: int, step: int, world: World) -> None:
    text = f"{seed}/{step}/{world.rank}"
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big"))
