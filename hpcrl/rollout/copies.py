"""Published versions on a disk of the node, one copy for all replicas that a run has there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from hpcrl.data.weight_files import PublishedWeights, copy_files, weight_facts
from hpcrl.errors import CommitError
from hpcrl.rundir.commit import begin, finish
from hpcrl.rundir.layout import Run
from hpcrl.runtime.scratch import SharedScratch
from hpcrl.runtime.token import read_token
from hpcrl.units import readable_size

_COPYING, _HELD, _FILES = "copying", "held", "files"


class NodeCopies:
    """The copies that the replicas of a run share on a node.

    Who copies or removes has a lock meanwhile, which the kernel releases when the process is killed; the next one then begins the copy
    anew. A replica holds a version from `hold` to `release`. What none holds is removed before another version is copied.

    Args:
        parent: generator.inference_engine.weight_copy_dir.

    Raises:
        RunError: there can be no directory in `parent`, or the run has no token.
    """

    def __init__(self, parent: Path, run: Run, attempt: int) -> None:
        self._attempt = attempt
        # a name that another user could work out would let that user take it first
        name = blake2b(bytes(run.path), key=read_token(run).encode(), digest_size=16).hexdigest()
        self._scratch = SharedScratch(parent, f"weights-{name}")
        self._held: int | None = None

    def hold(self, weights: PublishedWeights) -> PublishedWeights:
        """Return a version as it lies on this node, copied by this process if no other one has done so.

        Raises:
            CommitError: what was read is not what was published.
            OSError: it cannot be copied.
        """
        self.release()
        # a later attempt may publish another policy under the same number
        place = self._scratch.path / f"v{weights.version:06d}-{weights.digest}"
        with _locked(self._scratch.path / _COPYING, fcntl.LOCK_EX):
            self._remove_others(place)
            place.mkdir(exist_ok=True)
            copy = self._copied(weights, place / _FILES)
            self._held = _lock(place / _HELD, fcntl.LOCK_SH)
        return copy

    def release(self) -> None:
        """Let the version that this process holds make way for others."""
        if self._held is not None:
            os.close(self._held)
        self._held = None

    def close(self) -> None:
        """Leave; the last replica of the node removes everything."""
        self.release()
        self._scratch.remove()

    def _copied(self, weights: PublishedWeights, target: Path) -> PublishedWeights:
        with suppress(CommitError):  # not there yet, or not whole any more
            return replace(weights, path=PublishedWeights.read(target).path)
        for left in target.parent.glob(f"*{_FILES}*"):  # also by an attempt before this one
            shutil.rmtree(left, ignore_errors=True)
        directory = begin(target, self._attempt)
        try:
            if (free := shutil.disk_usage(directory).free) < weights.size:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {readable_size(free)} are left")
            files, facts = copy_files(weights, directory), weight_facts(weights.tensors, weights.probe)
            finish(target, self._attempt, files=files, version=weights.version, **facts)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return replace(weights, path=target)

    def _remove_others(self, place: Path) -> None:
        for other in self._scratch.path.glob("v*"):
            if other != place:
                with suppress(BlockingIOError), _locked(other / _HELD, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(other, ignore_errors=True)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    file = _lock(path, how)
    try:
        yield
    finally:
        os.close(file)


def _lock(path: Path, how: int) -> int:
    """Return the open lock; raises BlockingIOError with LOCK_NB where it is held."""
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, how)
    except BaseException:
        os.close(file)
        raise
    return file
