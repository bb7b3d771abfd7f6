"""Snapshots of sandboxes: what their programs have changed, one compressed archive each, by checksum."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from hpcrl.errors import DamagedError, DataError
from hpcrl.rundir.commit import children, make_directory
from hpcrl.sandboxes.archives import PARTIAL, Hashed, uncompressed, write_compressed
from hpcrl.sandboxes.sandbox import Sandbox

KEPT_S = 1800.0
"""How long a snapshot stays that no state names: those of the last turns are not written yet."""

_PIECE = 1 << 20


class SnapshotStore:
    """Snapshots in a directory. The same changes are stored once."""

    def __init__(self, directory: Path) -> None:
        self._path = directory

    def put(self, sandbox: Sandbox) -> str:
        """Keep what the programs of a sandbox have changed, and return its name, the SHA-256 of the archive.

        Raises:
            SandboxError: it is more than the limits of the sandbox allow, such as many sparse files.
        """
        make_directory(self._path)
        made = write_compressed(self._path, sandbox.snapshot)
        os.replace(made.path, self._file(made.digest))
        return made.digest

    @contextmanager
    def opened(self, digest: str) -> Iterator[IO[bytes]]:
        """Open a snapshot for a sandbox that is to begin with it.

        Raises:
            DataError: there is none of this name.
            DamagedError: it has changed.
        """
        path = self._file(digest) if re.fullmatch("[0-9a-f]{64}", digest) else None
        if path is None or not path.is_file():
            raise DataError(f"there is no snapshot {digest!r:.100} in {self._path}")
        with tempfile.TemporaryFile() as plain, uncompressed(path) as stream:
            hashed = Hashed(stream)
            while piece := hashed.read(_PIECE):
                plain.write(piece)
            if hashed.digest() != digest:
                raise DamagedError(f"{path} has changed: begin without it, or with an earlier snapshot")
            plain.seek(0)
            yield cast(IO[bytes], plain)

    def collect(self, named: Callable[[], Collection[str]]) -> int:
        """Remove snapshots, and what writers that were killed have left, older than KEPT_S; return how many.

        Others may put and open snapshots meanwhile: what is put once more is young again, and what is open stays readable. Ages are by the
        clock of the filesystem.

        Args:
            named: returns the snapshots that are to stay.
        """
        if not children(self._path):
            return 0
        with tempfile.NamedTemporaryFile(dir=self._path, prefix=PARTIAL) as new:
            now = os.stat(new.name).st_mtime
        old = [path for path in self._path.iterdir() if _is_old(path, now)]
        stay = {self._file(digest) for digest in named()} if old else set[Path]()
        removed = [path for path in old if path not in stay and _is_old(path, now)]  # put once more meanwhile
        for path in removed:
            path.unlink(missing_ok=True)
        return len(removed)

    def _file(self, digest: str) -> Path:
        return self._path / f"{digest}.tar.gz"


def _is_old(path: Path, now: float) -> bool:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime < now - KEPT_S
    return False
