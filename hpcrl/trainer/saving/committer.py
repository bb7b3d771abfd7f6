"""One checkpoint on its way to the disk: every rank writes its part and hashes it, rank 0 commits and retires older ones.

An error of one rank is raised on all, so that no rank waits for a failed one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.distributed.checkpoint.api import CheckpointException

from hpcrl.errors import CommitError
from hpcrl.faults import fault
from hpcrl.observe.metrics import Curve
from hpcrl.rundir.checkpoints import Retention, note_committed, retire
from hpcrl.rundir.commit import abandon, begin, finish, listing, staging, write_bytes
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import require_newest
from hpcrl.rundir.space import explained, failure, require_space
from hpcrl.trainer.backends.base import Writer
from hpcrl.trainer.distributed import World

log = logging.getLogger(__name__)

_OF_RANK = re.compile(r"(?:__|[a-z]+-)(\d+)[_.-]")  # as the engine names what a rank writes, and as rng-1.safetensors

_OF_TORCH = re.compile("PytorchStreamWriter|inline_container")


@dataclass(frozen=True)
class CheckpointContent:
    """Content of a checkpoint.

    Attributes:
        target: the directory that it becomes.
        writers: of engines, by folder.
        random: random states of this rank.
        facts: for the manifest.
        more: writes what else this rank keeps, without waiting for others.
    """

    target: Path
    writers: dict[str, Writer]
    random: dict[str, torch.Tensor]
    facts: dict[str, Any]
    more: Callable[[Path], None] = lambda _: None


class Committer:
    """Commits checkpoints one after the other. All ranks call it, from one thread each.

    Args:
        world: whose control group nobody else uses at the same time.
    """

    def __init__(self, run: Run, attempt: int, world: World, retention: Retention) -> None:
        self._run, self._attempt, self._world, self._retention = run, attempt, world, retention
        self._scores = Curve(run, retention.metric) if retention.metric else None
        self._size: int | None = None

    def with_new_group(self) -> Committer:
        """Return one for another thread; all ranks call it."""
        return Committer(self._run, self._attempt, self._world.with_new_group(), self._retention)

    def expect(self, size: int | None) -> None:
        """Set the size of the last checkpoint: the next one needs about as much space."""
        self._size = size

    @property
    def size(self) -> int | None:
        """Bytes of the last checkpoint, as far as it is known."""
        return self._size

    def commit(self, content: CheckpointContent) -> None:
        """Write and commit a checkpoint, and delete those that need not stay; returns on every rank once that is done.

        Raises:
            CommitError: on every rank: it could not be written, and nothing is left of it; or a newer attempt has begun.
        """
        world, target = self._world, content.target
        directory = staging(target, self._attempt)
        try:
            world.rank0_broadcast(lambda: self._begin(target, list(content.writers)))
            for folder, write in content.writers.items():
                with _disk_errors(target, self._size):
                    write(directory / folder, world.control)
            world.all_gather(lambda: self._write_own(directory, content))
            # once all have written: under passing names, which another rank would take for files
            parts = world.all_gather(lambda: self._own_files(directory, target))
            files = {name: entry for part in parts for name, entry in part.items()}
            world.rank0_broadcast(lambda: self._finish(content, files))
        except CommitError:
            if world.first:
                abandon(target, self._attempt, self.fence)
            raise
        self.expect(sum(entry["size"] for entry in files.values()))
        world.rank0_broadcast(self._retire)

    def fence(self) -> None:
        require_newest(self._run, self._attempt)

    def _begin(self, target: Path, folders: list[str]) -> None:
        self.fence()
        require_space(target.parent, self._size)
        with explained(target, self._size):
            directory = begin(target, self._attempt)
            for folder in folders:
                (directory / folder).mkdir(exist_ok=True)

    def _write_own(self, directory: Path, content: CheckpointContent) -> None:
        with explained(content.target, self._size):
            fault("commit.shard")
            save_tensors(content.random, rng_file(directory, self._world.rank))
            content.more(directory)

    def _own_files(self, directory: Path, target: Path) -> dict[str, Any]:
        with explained(target, self._size):
            return listing(directory, lambda path: _writer_of(path) == self._world.rank)

    def _finish(self, content: CheckpointContent, files: dict[str, Any]) -> None:
        with explained(content.target, self._size):
            finish(content.target, self._attempt, fence=self.fence, files=files, **content.facts)
            note_committed(self._run, self._attempt, content.facts["step"])

    def _retire(self) -> None:
        try:
            evaluated = begun_evaluations(self._run)
            scores = self._scores.values() if self._scores else {}
            retire(self._run, self._retention, scores, self.fence, evaluated)
        except OSError as error:
            log.warning("older checkpoints could not be deleted: %s", error)


@contextmanager
def _disk_errors(target: Path, need: int | None) -> Iterator[None]:
    """Convert the engine's error, raised on every rank where one rank's disk failed, to a CommitError."""
    with explained(target, need):
        try:
            yield
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                # torch reports the failed close of a file; of another rank without the first error
                for told in (cause, cause.__context__):
                    if isinstance(told, OSError):
                        raise told from error
                if isinstance(cause, RuntimeError) and _OF_TORCH.search(str(cause)):
                    raise failure(target, str(cause).splitlines()[0], None, need) from error
            raise


def _writer_of(path: Path) -> int:
    match = _OF_RANK.match(path.name)
    return int(match[1]) if match else 0


def rng_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"rng-{rank}.safetensors"


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, which is on the disk then.

    The library's own writer would miss lost bytes: NFS and Lustre report them when the file is synced or closed.
    """
    write_bytes(path, save(tensors, metadata))
