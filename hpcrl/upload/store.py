"""Declares a store, which takes exports, or checkpoints too, and the committed directories that are sent to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from hpcrl.errors import CommitError, HpcrlError, ServiceError
from hpcrl.rundir.commit import COMMIT, MANIFEST, read_bytes, verify

_T = TypeVar("_T")


class Away(ServiceError):
    """A store does not answer, or not now; the same may work later."""


class UploadRefused(ServiceError):
    """A store refuses, until a person changes something."""


class Vanished(HpcrlError):
    """A directory was deleted or written again by its run during its upload."""


@dataclass(frozen=True)
class Patience:
    """Retries of a request while a store is away: after `first_s`, then after twice the time each, `total_s` in all."""

    first_s: float = 1.0
    longest_s: float = 60.0
    total_s: float = 300.0

    def repeat(self, ask: Callable[[], _T]) -> _T:
        """Return the result of `ask`, with retries. Raises Away where it still is."""
        deadline, wait = time.monotonic() + self.total_s, self.first_s
        while True:
            try:
                return ask()
            except Away:
                if time.monotonic() + wait > deadline:
                    raise
            time.sleep(wait)
            wait = min(2 * wait, self.longest_s)


@dataclass(frozen=True)
class Committed:
    """A committed directory of a run: an export or a checkpoint.

    Attributes:
        name: exports/s000040.
        mark: content of its COMMIT file, which names the digest of the manifest.
        files: size of each file but the mark, by its path in the directory; the manifest is the last one.
        checksums: BLAKE2b digests of the manifest, by the same path; weights in exports have none.
    """

    path: Path
    name: str
    mark: bytes
    files: dict[str, int]
    checksums: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Committed:
        """Return what is committed at `path`, after comparing the sizes of its files with the manifest.

        Raises:
            Vanished: nothing is there any more.
            CommitError: a file is missing, or cut short.
        """
        mark = read_bytes(path / COMMIT)
        if mark is None:
            raise Vanished(f"{path} was deleted by its run before it could be sent")
        found = cls(path, name_of(path), mark, {}, {})
        try:
            entries = verify(path, checksums=False)["files"]
            sizes = {name: entry["size"] for name, entry in sorted(entries.items())}
            found.files.update(sizes | {MANIFEST: (path / MANIFEST).stat().st_size})
        except (CommitError, OSError):
            found.require_there()
            raise
        found.checksums.update({name: entry["blake2b"] for name, entry in entries.items() if "blake2b" in entry})
        return found

    def require_there(self) -> None:
        """Raise Vanished where the run has deleted it meanwhile, or has committed another in its place."""
        if read_bytes(self.path / COMMIT) != self.mark:
            raise Vanished(
                f"{self.path} was deleted or written again by its run during its upload; that upload is given up"
            )


def name_of(path: Path) -> str:
    """Return how a directory is called in stores: exports/s000040."""
    return f"{path.parent.name}/{path.name}"


class Store(Protocol):
    """Destination of copies."""

    @property
    def place(self) -> str:
        """Address with the run's part of it, for people."""
        ...

    def send(self, directory: Committed, sent: Callable[[int], None]) -> int:
        """Make the store have a directory, complete and with the right checksums; return how many bytes had to be sent.

        Until it is complete, nothing in the store looks as if it were. What is there already, also from a call that was killed, is not sent again.

        Args:
            sent: is called with the bytes that the store has received, also those of an earlier upload.

        Raises:
            Away, UploadRefused: the store cannot, or will not, take it.
            Vanished: the run has deleted the directory meanwhile.
            CommitError: a file is not what the manifest says.
        """
        ...
