"""Published versions on a disk of the node, one copy for all replicas that a run has there: whole, also of a version that was published as changes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from hpcrl.data.weight_files import PublishedWeights, check_tensors, copy_files, sizes_in, weight_facts
from hpcrl.data.weights.changes import apply_changes
from hpcrl.errors import CommitError
from hpcrl.rollout.weights.receive import NotReceived, Receiver
from hpcrl.rundir.commit import begin, finish
from hpcrl.rundir.layout import Run
from hpcrl.runtime.scratch import SharedScratch
from hpcrl.runtime.token import read_token
from hpcrl.units import readable_size

_COPYING, _HELD, _FILES = "copying", "held", "files"


class NodeCopies:
    """The copies that the replicas of a run share on a node.

    Copying and removing hold a lock, which the kernel releases when the process is killed; the next one then begins the copy again. A
    replica holds a version from `hold` to `release`. What none holds is removed before another version is copied.

    Args:
        parent: generator.inference_engine.weight_copy_dir.
        receiver: has the trainer send the files of a version; None: they are read where they were published.

    Attributes:
        fetched: metrics of the last version that this process has held: what it brought to the node, nothing where another had done so.

    Raises:
        RunError: there can be no directory in `parent`, or the run has no token.
    """

    def __init__(self, parent: Path, run: Run, attempt: int, receiver: Receiver | None = None) -> None:
        self._attempt, self._receiver = attempt, receiver
        self.fetched: dict[str, float] = {}
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
        self.fetched = {}
        place = self._place(weights.version, weights.digest)
        with _locked(self._scratch.path / _COPYING, fcntl.LOCK_EX):
            copy = self._found(weights, place) or self._copied(weights, place)
            self._held = _lock(place / _HELD, fcntl.LOCK_SH)
            self._remove_others(place)
        return copy

    def _place(self, version: int, digest: str) -> Path:
        # a later attempt may publish another policy under the same number
        return self._scratch.path / f"v{version:06d}-{digest}"

    def release(self) -> None:
        """Release the version that this process holds."""
        if self._held is not None:
            os.close(self._held)
        self._held = None

    def close(self) -> None:
        """Close; the last replica of the node removes everything."""
        self.release()
        self._scratch.remove()

    def _below(self, weights: PublishedWeights) -> list[PublishedWeights]:
        """Return the versions that a version of changes needs: a whole version, this node's copy if there is one, and those with changes
        after it."""
        below = list[PublishedWeights]()
        while base := weights.base:
            with suppress(CommitError):
                return [PublishedWeights.read(self._place(base.version, base.digest) / _FILES), *below]
            weights = weights.read_base()
            below.insert(0, weights)
        return below

    def _found(self, weights: PublishedWeights, place: Path) -> PublishedWeights | None:
        """Return the existing copy; None where there is none, or it is not whole any more."""
        with suppress(CommitError):
            found = PublishedWeights.read(place / _FILES)
            return replace(weights, path=found.path, size=found.size, base=None)
        return None

    def _copied(self, weights: PublishedWeights, place: Path) -> PublishedWeights:
        below = self._below(weights)
        self._remove_others(place, *(version.path.parent for version in below))
        try:
            self._copy(weights, below, place / _FILES)
        except CommitError:
            if not below or not self._is_here(below[0]):
                raise
            shutil.rmtree(below[0].path.parent)  # what the node had may have changed since
            self._copy(weights, self._below(weights), place / _FILES)
        copy = self._found(weights, place)
        assert copy, f"{place} was made"
        return copy

    def _is_here(self, version: PublishedWeights) -> bool:
        return version.path.is_relative_to(self._scratch.path)

    def _copy(self, weights: PublishedWeights, below: Sequence[PublishedWeights], target: Path) -> None:
        target.parent.mkdir(exist_ok=True)
        for left in target.parent.glob(f"*{_FILES}*"):  # also by an attempt before this one
            shutil.rmtree(left, ignore_errors=True)
        directory = begin(target, self._attempt)
        try:
            needed = (below or [weights])[0].size
            if (free := shutil.disk_usage(directory).free) < needed:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {readable_size(free)} are left")
            files, facts = self._fill(weights, below, directory), weight_facts(weights.tensors, weights.probe)
            finish(target, self._attempt, files=files, version=weights.version, **facts)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _fill(
        self, weights: PublishedWeights, below: Sequence[PublishedWeights], directory: Path
    ) -> dict[str, dict[str, int]]:
        moved = sum(version.size for version in (*below, weights) if not self._is_here(version))
        self.fetched = {"weights/fetch_gib": moved / 2**30}
        if self._receiver:
            try:
                files = self._received(self._receiver, weights, below, directory)
            except (NotReceived, CommitError) as error:
                print(
                    f"warning: version {weights.version} did not come over the network, its files are read: {error}",
                    flush=True,
                )
            else:
                self.fetched["weights/received"] = 1.0
                return files
            self.fetched["weights/received"] = 0.0
        return (
            apply_changes(below[0].path, [*below[1:], weights], directory) if below else copy_files(weights, directory)
        )

    def _received(
        self, receiver: Receiver, weights: PublishedWeights, below: Sequence[PublishedWeights], directory: Path
    ) -> dict[str, dict[str, int]]:
        if not below:
            receiver.receive(weights, directory)
            check_tensors(replace(weights, path=directory))
            return sizes_in(directory)
        changes = directory / "received"
        changes.mkdir()
        try:
            receiver.receive(weights, changes)
            return apply_changes(below[0].path, [*below[1:], replace(weights, path=changes)], directory)
        finally:
            shutil.rmtree(changes)

    def _remove_others(self, *places: Path) -> None:
        for other in self._scratch.path.glob("v*"):
            if other not in places:
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
