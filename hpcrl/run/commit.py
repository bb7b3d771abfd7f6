"""Writes that are either complete or absent, on a filesystem that several nodes share.

A file is written beside its place and renamed. A directory is filled under a name that only this attempt uses, described by a
manifest (sizes and checksums), renamed, and then marked with COMMIT; a reader trusts nothing without the mark.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcrl.errors import CommitError

MANIFEST = "manifest.json"
COMMIT = "COMMIT"
_CHUNK = 1 << 22


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network filesystems cannot sync a directory; the order of the writes still holds
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file at `path` as a whole; a reader sees the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    _sync_directory(path.parent)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace the text file at `path` as a whole."""
    write_bytes(path, text.encode(), mode)


def write_json(path: Path, value: Any) -> None:
    """Replace the JSON file at `path` as a whole."""
    write_text(path, json.dumps(value))


def read_json(path: Path) -> Any | None:
    """Return the JSON value at `path`, or None where there is no such file."""
    for last in (False, False, True):
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE or last:  # replaced on the server between our open and our read
                raise
    return None


def checksum(path: Path) -> str:
    """Return the BLAKE2b-128 digest of a file as hexadecimal text."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _manifest(directory: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {
        str(path.relative_to(directory)): {"size": path.stat().st_size, "blake2b": checksum(path)} for path in files
    }


def staging(target: Path, attempt: int) -> Path:
    """Return the name under which attempt `attempt` fills what will become `target`."""
    return target.with_name(f".tmp-{target.name}.{attempt}")


def begin(target: Path, attempt: int) -> Path:
    """Create and return the empty staging directory of `target`."""
    directory = staging(target, attempt)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def finish(target: Path, attempt: int, **facts: Any) -> None:
    """Commit the staging directory of `target`: manifest, rename, mark.

    Args:
        facts: JSON values to keep in the manifest, such as the step.
    """
    directory = staging(target, attempt)
    text = json.dumps({**facts, "attempt": attempt, "files": _manifest(directory)})
    write_text(directory / MANIFEST, text)
    if target.exists():  # not committed, or the caller would not write it again
        discard(target)
    os.rename(directory, target)
    _sync_directory(target.parent)
    mark = {"attempt": attempt, "manifest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}
    write_json(target / COMMIT, mark)


@contextmanager
def committed_directory(target: Path, attempt: int, **facts: Any) -> Iterator[Path]:
    """Fill a directory that appears at `target` complete, or not at all."""
    yield begin(target, attempt)
    finish(target, attempt, **facts)


def is_committed(path: Path) -> bool:
    return (path / COMMIT).is_file()


def verify(path: Path, checksums: bool = True) -> dict[str, Any]:
    """Return the manifest of a committed directory after comparing its files with it.

    Raises:
        CommitError: the mark, the manifest or a file is missing or differs.
    """
    mark, manifest = read_json(path / COMMIT), path / MANIFEST
    if mark is None:
        raise CommitError(f"{path} was never committed (no {COMMIT} file): its writer did not finish")
    if not manifest.is_file():
        raise CommitError(f"{path} has no {MANIFEST}")
    text = manifest.read_text()
    if hashlib.blake2b(text.encode(), digest_size=16).hexdigest() != mark["manifest"]:
        raise CommitError(f"{manifest} is not the manifest that was committed")
    content = json.loads(text)
    for name, entry in content["files"].items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["size"]:
            raise CommitError(
                f"{file}: expected {entry['size']} bytes, found {size if size is not None else 'no file'}"
            )
        if checksums and checksum(file) != entry["blake2b"]:
            raise CommitError(f"{file}: checksum differs from the manifest")
    return content


def newest_committed(parent: Path, number: Callable[[Path], int | None], skipped: Callable[[str], None]) -> Path | None:
    """Return the committed and verified directory in `parent` with the highest number, or None.

    Args:
        number: gives the step or version of a path, None for a foreign name.
        skipped: is told about each directory that is passed over, and why.
    """
    numbered = [(value, path) for path in _children(parent) if (value := number(path)) is not None]
    for _, path in sorted(numbered, reverse=True):
        try:
            verify(path)
        except CommitError as error:
            skipped(str(error))
        else:
            return path
    return None


def committed(parent: Path, number: Callable[[Path], int | None]) -> list[int]:
    """Return the numbers of the committed directories in `parent`, ascending."""
    return sorted(value for path in _children(parent) if (value := number(path)) is not None and is_committed(path))


def _children(parent: Path) -> list[Path]:
    return list(parent.iterdir()) if parent.is_dir() else []


def discard(path: Path) -> None:
    """Remove a directory that others may be reading: it leaves its name at once and the disk soon after."""
    trash = path.with_name(f".trash-{path.name}.{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)
    try:
        os.rename(path, trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)
