"""Snapshots of sandboxes: what their programs have changed, as blocks that are stored once each, compressed, by checksum.

A snapshot is an archive, and its file a list of the archive's blocks. Where a block ends follows from its content, at the records of the
archive (content-defined chunking: Muthitacharoen et al., A Low-bandwidth Network File System, SOSP 2001). So a file that is changed, made or
removed changes the blocks that it lies in, and each turn stores those alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from hpcrl.errors import DamagedError, DataError
from hpcrl.rundir.commit import children, make_directory, read_bytes
from hpcrl.sandboxes.archives import PARTIAL
from hpcrl.sandboxes.sandbox import Sandbox

KEPT_S = 1800.0
"""How long a snapshot stays that no state names and no sandbox uses: those of the last turns are not written yet."""

SMALLEST, LARGEST = 256 << 10, 4 << 20
"""Bytes of a block; the last one may have less."""

_DIGEST = "[0-9a-f]{64}"
_LISTS = "*.blocks"
_ASIDE = re.compile(rf"{re.escape(PARTIAL)}({_DIGEST}\.(?:blocks|z))")
_RECORD = 512  # of an archive
_ONE_IN = 2048  # records after which a block ends, as a rule
_PIECE = 1 << 20
_LEVEL = 1  # of zlib: the policy waits
_AT_ONCE = 4  # blocks that are compressed and written


class SnapshotStore:
    """Snapshots in a directory. The same blocks are stored once, whatever sandboxes they are of."""

    def __init__(self, directory: Path) -> None:
        self._path, self._blocks = directory, directory / "blocks"

    def put(self, sandbox: Sandbox, only: Sequence[str] = ()) -> str:
        """Keep what the programs of a sandbox have changed, and return its name, the SHA-256 of the list of blocks.

        Args:
            only: as of `Sandbox.snapshot`.

        Raises:
            SandboxError: it is more than the limits of the sandbox allow, such as many sparse files.
        """
        make_directory(self._blocks)
        stage, names, writes = f"{PARTIAL}{secrets.token_hex(8)}-", list[str](), dict[str, Future[bool]]()
        try:
            with tempfile.TemporaryFile() as plain, ThreadPoolExecutor(_AT_ONCE) as threads:
                waiting = deque[Future[bool]]()

                def keep(block: bytes) -> None:
                    names.append(name := hashlib.sha256(block).hexdigest())
                    if name in writes:
                        return
                    if len(waiting) >= 2 * _AT_ONCE:
                        waiting.popleft().result()
                    writes[name] = threads.submit(self._stage, name, stage, block)
                    waiting.append(writes[name])

                # its programs stand still meanwhile, for a bounded time: they do not wait for a shared filesystem
                sandbox.snapshot(cast(IO[bytes], plain), only)
                plain.seek(0)
                cutter = _Cutter(keep)
                while piece := plain.read(_PIECE):
                    cutter.write(piece)
                cutter.finish()
                list(threads.map(lambda name: writes[name].result() and self._commit(name, stage), writes))
        except BaseException:
            for name in writes:
                self._block(name, stage).unlink(missing_ok=True)
            raise
        listed = "".join(f"{name}\n" for name in names).encode()
        digest = hashlib.sha256(listed).hexdigest()
        _write(self._file(digest), listed)
        return digest

    def _stage(self, name: str, stage: str, block: bytes) -> bool:
        """Write a block beside the others, unless it is there; return whether it is new."""
        try:
            os.utime(self._block(name))  # young once more: the list of this snapshot is not written yet
        except FileNotFoundError:
            self._block(name, stage).write_bytes(zlib.compress(block, _LEVEL))
            return True
        return False

    def _commit(self, name: str, stage: str) -> None:
        with self._block(name, stage).open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self._block(name, stage), self._block(name))

    def hold(self, digest: str) -> None:
        """Let a snapshot be as young as if it had been put now."""
        for path in (self._file(digest), _aside(self._file(digest))):
            with suppress(FileNotFoundError):
                os.utime(path)

    @contextmanager
    def opened(self, digest: str) -> Iterator[IO[bytes]]:
        """Open a snapshot for a sandbox that is to begin with it.

        Raises:
            DataError: there is none of this name.
            DamagedError: it has changed.
        """
        listed = _read(self._file(digest)) if re.fullmatch(_DIGEST, digest) else None
        if listed is None:
            raise DataError(f"there is no snapshot {digest!r:.100} in {self._path}")
        names = listed.decode(errors="replace").split()
        # a list with another name could lead out of the directory
        if hashlib.sha256(listed).hexdigest() != digest or not all(re.fullmatch(_DIGEST, name) for name in names):
            raise self._damaged(self._file(digest))
        with tempfile.TemporaryFile() as plain:
            for name in names:
                plain.write(self._content(name))
            plain.seek(0)
            yield cast(IO[bytes], plain)

    def _content(self, name: str) -> bytes:
        packed = _read(self._block(name))
        if packed is None:
            raise DataError(f"{self._block(name)} is missing: begin without the snapshot, or with an earlier one")
        try:
            block = zlib.decompressobj().decompress(packed, LARGEST + 1)
        except zlib.error as error:
            raise self._damaged(self._block(name)) from error
        if hashlib.sha256(block).hexdigest() != name:
            raise self._damaged(self._block(name))
        return block

    def _damaged(self, path: Path) -> DamagedError:
        """Remove a damaged file, so that the next snapshot with its content writes it again; return the error."""
        path.unlink(missing_ok=True)
        return DamagedError(f"{path} has changed: begin without the snapshot, or with an earlier one")

    def collect(self, named: Callable[[], Collection[str]]) -> int:
        """Remove snapshots, blocks of none, and what writers that were killed have left, older than KEPT_S; return how many files.

        Others may put and open snapshots meanwhile: what is put once more is young again. Ages are by the clock of the filesystem.

        Args:
            named: returns the snapshots that are to stay.
        """
        if not children(self._path):
            return 0
        make_directory(self._blocks)
        for place in (self._path, self._blocks):
            _put_back(place)
        with tempfile.NamedTemporaryFile(dir=self._path, prefix=PARTIAL) as new:
            before = os.stat(new.name).st_mtime - KEPT_S
        lists, blocks = (
            [path for path in place.iterdir() if path.is_file() and _is_old(path, before)]
            for place in (self._path, self._blocks)
        )
        stay = {self._file(digest) for digest in named()} if lists else set[Path]()
        removed = [path for path in lists if path not in stay and _removed(path, before)]
        if blocks:
            used = {name for path in self._path.glob(_LISTS) for name in (read_bytes(path) or b"").split()}
            removed += [path for path in blocks if path.stem.encode() not in used and _removed(path, before)]
        return len(removed)

    def _file(self, digest: str) -> Path:
        return self._path / f"{digest}.blocks"

    def _block(self, name: str, stage: str = "") -> Path:
        return self._blocks / f"{stage}{name}.z"


class _Cutter:
    """An archive that is cut into blocks as it is written.

    Args:
        keep: called with each block.
    """

    def __init__(self, keep: Callable[[bytes], object]) -> None:
        self._keep, self._block, self._at = keep, bytearray(), SMALLEST

    def write(self, content: bytes) -> None:
        self._block += content
        while end := self._end():
            self._keep(bytes(self._block[:end]))
            del self._block[:end]
            self._at = SMALLEST

    def finish(self) -> None:
        if self._block:
            self._keep(bytes(self._block))

    def _end(self) -> int:
        """Return where the block ends that is written; 0: further on."""
        with memoryview(self._block) as block:
            for end in range(self._at, len(block) + 1, _RECORD):
                if end >= LARGEST or zlib.crc32(block[end - _RECORD : end]) % _ONE_IN == 0:
                    return end
            self._at = max(self._at, (len(block) // _RECORD + 1) * _RECORD)
        return 0


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole; it is on the disk then. Threads and nodes may write the same one at a time."""
    descriptor, partial = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _aside(path: Path) -> Path:
    """Return the name that a file has while it is removed."""
    return path.with_name(f"{PARTIAL}{path.name}")


def _read(path: Path) -> bytes | None:
    """Return the content of a file, also of one that is being removed, or None: a collector may find it young and put it back."""
    return next((content for name in (path, _aside(path), path) if (content := read_bytes(name)) is not None), None)


def _put_back(place: Path) -> None:
    """Give the files their names again that a collector which was killed has left aside: some may have been put once more."""
    for name in children(place):
        if found := _ASIDE.fullmatch(name):
            with suppress(FileNotFoundError, FileExistsError):  # one that was put since is the same
                os.link(place / name, place / found[1])
            (place / name).unlink(missing_ok=True)


def _is_old(path: Path, before: float) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:  # a network filesystem asks its server only then
        return os.fstat(file.fileno()).st_mtime < before
    return False


def _removed(path: Path, before: float) -> bool:
    """Remove a file, unless it is put once more meanwhile: who does so finds it before it has another name, or writes it again."""
    aside = _aside(path) if not path.name.startswith(PARTIAL) else path
    with suppress(FileNotFoundError):
        path.rename(aside)
        if _is_old(aside, before):
            aside.unlink()
            return True
        aside.rename(path)
    return False
