"""Compressed archives, and their checksums."""

from __future__ import annotations

import gzip
import hashlib
import os
import secrets
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

from hpcrl.errors import DataError

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
PARTIAL = ".partial-"
"""Prefix of the names of files that are being written."""
_LEVEL = 1  # of gzip: nodes wait for archives


class Archive(NamedTuple):
    """An archive that was written.

    Attributes:
        digest: SHA-256 of its bytes, uncompressed.
        size: their number.
    """

    path: Path
    digest: str
    size: int


class Hashed:
    """A stream whose bytes are hashed as they are read or written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._hash, self.size = stream, hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        return self._seen(self._stream.read(size))

    def write(self, content: bytes) -> int:
        self._stream.write(self._seen(content))
        return len(content)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _seen(self, content: bytes) -> bytes:
        self._hash.update(content)
        self.size += len(content)
        return content


@contextmanager
def uncompressed(archive: Path) -> Iterator[IO[bytes]]:
    """Open an archive that may be compressed by gzip, or by zstd where its program is installed. Raises DataError where it is damaged."""
    with archive.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        try:
            if magic.startswith(_GZIP):
                with gzip.GzipFile(fileobj=file) as plain:
                    yield cast(IO[bytes], plain)
            elif magic == _ZSTD:
                yield from _from_zstd(archive)
            else:
                yield file
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(f"the compressed archive is damaged: {error}") from error


def _from_zstd(archive: Path) -> Iterator[IO[bytes]]:
    if (program := shutil.which("zstd")) is None:
        raise DataError("it is compressed by zstd: install zstd, or save the image with layers compressed by gzip")
    with subprocess.Popen([program, "-dcq", archive], stdout=subprocess.PIPE) as process:
        try:
            yield cast(IO[bytes], process.stdout)
            if process.wait() != 0:
                raise DataError("the compressed archive is damaged: zstd cannot read it")
        finally:
            process.kill()


def write_compressed(directory: Path, write: Callable[[IO[bytes]], None]) -> Archive:
    """Compress what `write` writes into a new file of a directory, which the caller renames; it is on the disk then."""
    path = directory / f"{PARTIAL}{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)  # who shares the root of runs reads it too
    try:
        with os.fdopen(descriptor, "wb") as file:
            with gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
                hashed = Hashed(cast(IO[bytes], packed))
                write(cast(IO[bytes], hashed))
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        os.unlink(path)
        raise
    return Archive(path, hashed.digest(), hashed.size)
