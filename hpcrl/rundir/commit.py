"""Writes that are either complete or absent, on a filesystem that several nodes share.

A file is written beside its place and renamed. A directory is filled under a name that only this attempt uses, described by a
manifest (sizes and checksums), renamed, and then marked with COMMIT. A reader trusts nothing without the mark.

A process of an older attempt may still be alive: on a node that the network lost, or suspended. Who commits or deletes can pass a
fence, which raises if that is so. It is called before the rename and before the mark. The mark is written through the directory that
was renamed, not through its name, which another attempt may have by then. What is deleted leaves its name first and is put back if the fence
objects.

Fault points, each also with the name of the parent directory instead of "commit" (checkpoints.renamed, weights.renamed, ...):
commit.begin, commit.written, commit.manifest, commit.renamed, commit.synced, commit.committed, commit.trash. Of checkpoints there are also
commit.shard (a rank writes its part) and commit.retire (older ones are about to go).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hpcrl.errors import CommitError
from hpcrl.faults import fault

Fence = Callable[[], None]
"""Raises CommitError if a newer attempt has begun."""

Number = TypeVar("Number", int, tuple[int, int])
"""By which committed directories are ordered: a step, a version, a position of training."""

MANIFEST = "manifest.json"
COMMIT = "COMMIT"
_CHUNK = 1 << 20  # stays in the processor's cache between the read and the hash
LARGEST_RECORD = 1 << 30  # a file without content may claim any size
_AT_ONCE = 16  # files that are synced or hashed at the same time


def _sync(directory: int) -> None:
    try:
        os.fsync(directory)
    except OSError as error:  # some network filesystems cannot sync a directory; the order of the writes still holds
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _put(name: str, content: bytes, mode: int, folder: int) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode, dir_fd=folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write(contents: Mapping[str, bytes], mode: int, folder: int) -> None:
    beside = {name: f".{name}.{socket.gethostname()}.{os.getpid()}" for name in contents}
    try:
        if len(contents) == 1:
            ((name, content),) = contents.items()
            _put(beside[name], content, mode, folder)
        else:  # a filesystem syncs several files at a time in hardly more time than one
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                list(threads.map(lambda name: _put(beside[name], contents[name], mode, folder), contents))
        for name in contents:
            os.replace(beside[name], name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        for name in beside.values():  # on a full disk the parts of files would take what room is left
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
        raise
    _sync(folder)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and missing parents, also while other processes create them.

    Raises:
        FileExistsError: something else has that name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        # another node may have made it, and this one remembers that it was not there, as in `children`
        made = Path(error.filename)
        os.listdir(made.parent)
        if not made.is_dir():
            raise
        make_directory(path)


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file at `path` as a whole; a reader sees the old content or the new one."""
    write_files(path.parent, {path.name: content}, mode)


def write_files(directory: Path, contents: Mapping[str, bytes], mode: int = 0o644) -> None:
    """Replace several files of a directory, each as a whole; all of them outlive a crash of the node from then on.

    Args:
        contents: by name of the file.
    """
    make_directory(directory)
    with _opened(directory) as folder:
        try:
            _write(contents, mode, folder)
        except OSError as error:  # of an open file, it has no name
            error.filename = str(directory / next(iter(contents)) if len(contents) == 1 else directory)
            raise


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace the text file at `path` as a whole."""
    write_bytes(path, text.encode(), mode)


def write_json(path: Path, value: Any) -> None:
    """Replace the JSON file at `path` as a whole."""
    write_text(path, json.dumps(value))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, or nested more deeply than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any | None:
    """Return the JSON value at `path`, or None where there is no such file.

    Raises:
        ValueError: it is no JSON.
    """
    content = read_bytes(path)
    return None if content is None else parse_json(content)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file of a run for reading, which another user may have made: a pipe would block the reader, a device has no end.

    Raises:
        OSError: it cannot be opened, or is none; names it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int | None = LARGEST_RECORD) -> bytes | None:
    """Return the content of a file that others replace as a whole, or None where there is no such file.

    Args:
        most: bytes; None for files of data, which grow with batches and texts.

    Raises:
        OSError: it cannot be read, or has more than `most` bytes; names it.
    """
    for last in (False, False, True):
        try:
            with naming(path), open_file(path) as file:
                if most is not None and os.fstat(file.fileno()).st_size > most:
                    raise OSError(errno.EFBIG, f"it is larger than {most >> 30} GiB")
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            if last or path.name not in children(path.parent):
                return None
        except OSError as error:
            if error.errno != errno.ESTALE or last:  # replaced on the server between our open and our read
                raise
    return None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError say that it is about `path`: one of a file that is open names nothing."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def children(directory: Path) -> list[str]:
    """Return the names in a directory; none where it is not there.

    A network filesystem may remember for a minute that something was not there. Listing the directory above makes it look again.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(directory)
    if directory.name and directory.name in children(directory.parent):
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(directory)
    return []


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE2b-128 digest as hexadecimal text."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def checksum(path: Path) -> str:
    """Return the BLAKE2b-128 digest of a file as hexadecimal text."""
    digest, buffer = hashlib.blake2b(digest_size=16), memoryview(bytearray(_CHUNK))
    with naming(path), path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def checksums_of(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the checksum of each file, in their order; several are hashed at a time, which hashlib does without Python's lock."""
    with ThreadPoolExecutor(_AT_ONCE, "checksum") as threads:
        yield from threads.map(checksum, paths)


def listing(directory: Path, wanted: Callable[[Path], bool] = lambda _: True) -> dict[str, dict[str, Any]]:
    """Return size and checksum of each wanted file below `directory`, by relative path, once they are on the disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and wanted(path))
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {
        str(path.relative_to(directory)): {"size": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(files, checksums_of(files), strict=True)
    }


def _pass(point: str, target: Path) -> None:
    fault(f"commit.{point}")
    fault(f"{target.parent.name}.{point}")


def staging(target: Path, attempt: int) -> Path:
    """Return the name under which attempt `attempt` fills what will become `target`."""
    return target.with_name(f".tmp-{target.name}.{attempt}")


def begin(target: Path, attempt: int) -> Path:
    """Create and return the empty staging directory of `target`."""
    directory = staging(target, attempt)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _pass("begin", target)
    return directory


def unfenced() -> None:
    """The fence of what only one process can write."""


def finish(
    target: Path,
    attempt: int,
    *,
    fence: Fence = unfenced,
    files: dict[str, dict[str, Any]] | None = None,
    **facts: Any,
) -> None:
    """Commit the staging directory of `target`: manifest, rename, mark. What an older attempt left there makes way.

    A whole directory that this attempt has committed already stays as it is. Its commit may have raised only because the
    directory could not be synced after the mark.

    Args:
        files: what `listing` gave of all files in it, or their sizes alone where the facts say more; None: they are listed here.
        facts: JSON values to keep in the manifest, such as the step.

    Raises:
        CommitError: the fence objects, a later attempt has committed `target` already, or this one did and it is damaged.
    """
    directory = staging(target, attempt)
    _pass("written", target)
    text = json.dumps({**facts, "attempt": attempt, "files": listing(directory) if files is None else files})
    write_text(directory / MANIFEST, text)
    _pass("manifest", target)
    fence()
    other = committed_by(target)
    if other == attempt:
        verify(target)
        shutil.rmtree(directory)
        return
    if other is not None and other > attempt:
        raise CommitError(f"{target} is committed already, by attempt {other}; attempt {attempt} leaves it as it is")
    if target.exists():
        discard(target, fence)
    with _opened(directory) as renamed, _opened(target.parent) as parent:
        os.rename(directory, target)
        _pass("renamed", target)
        _sync(parent)
        _pass("synced", target)
        fence()
        mark = {"attempt": attempt, "manifest": digest_of(text.encode())}
        _write({COMMIT: json.dumps(mark).encode()}, 0o644, renamed)
    _pass("committed", target)


def abandon(target: Path, attempt: int, fence: Fence = unfenced) -> None:
    """Remove what attempt `attempt` has written of `target` and not committed, as far as the filesystem lets it."""
    shutil.rmtree(staging(target, attempt), ignore_errors=True)
    with suppress(OSError, CommitError):
        manifest = read_json(target / MANIFEST)
        if manifest and manifest["attempt"] == attempt and not is_committed(target):
            discard(target, fence)


@contextmanager
def committed_directory(target: Path, attempt: int, *, fence: Fence = unfenced, **facts: Any) -> Iterator[Path]:
    """Fill a directory that appears at `target` complete, or not at all."""
    try:
        yield begin(target, attempt)
        finish(target, attempt, fence=fence, **facts)
    except BaseException:
        abandon(target, attempt, fence)
        raise


def committed_by(path: Path) -> int | None:
    """Return the attempt that committed the directory at `path`; None where none has, or its mark cannot be read."""
    try:
        mark = read_json(path / COMMIT)
        return int(mark["attempt"]) if mark else None
    except (ValueError, TypeError, KeyError):
        return None


def is_committed(path: Path) -> bool:
    """Return whether the mark is there, also where another node has made it a moment ago."""
    return (path / COMMIT).is_file() or COMMIT in children(path)


def verify(path: Path, checksums: bool = True) -> dict[str, Any]:
    """Return the manifest of a committed directory after comparing its files with it.

    Args:
        checksums: compare them too, beside the sizes.

    Raises:
        CommitError: the mark, the manifest or a file is missing, differs or cannot be read.
    """
    with _unreadable(path):
        manifest = _manifest(path)
        for name, entry in manifest["files"].items():
            file = path / name
            size = file.stat().st_size if file.is_file() else None
            if size != entry["size"]:
                found = size if size is not None else "no file"
                raise CommitError(f"{file}: expected {entry['size']} bytes, found {found}")
    if checksums:
        verify_checksums(path, manifest["files"])
    return manifest


def verify_checksums(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the checksums of files of a committed directory with entries of its manifest.

    Raises:
        CommitError: a file differs, is missing or cannot be read.
    """
    expected = {path / name: entry["blake2b"] for name, entry in files.items() if "blake2b" in entry}
    with _unreadable(path):
        for folder in {file.parent for file in expected}:
            children(folder)  # which makes a network filesystem look for files that it remembers were not there
        for file, found in zip(expected, checksums_of(expected), strict=True):
            if found != expected[file]:
                raise CommitError(f"{file}: checksum differs from the manifest")


@contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommitError(f"{error.filename or path} cannot be read: {error.strerror}") from error


def _manifest(path: Path) -> dict[str, Any]:
    manifest = path / MANIFEST
    try:
        mark = read_json(path / COMMIT)
        expected, by = (mark["manifest"], mark["attempt"]) if mark is not None else (None, None)
    except (ValueError, TypeError, KeyError):
        raise CommitError(f"{path / COMMIT} is no mark of a commit") from None
    if expected is None:
        raise CommitError(f"{path} was never committed (no {COMMIT} file): its writer did not finish")
    if not manifest.is_file():
        raise CommitError(f"{path} has no {MANIFEST}")
    text = manifest.read_bytes()
    if digest_of(text) != expected:
        raise CommitError(f"{manifest} is not the manifest that was committed")
    try:
        content = parse_json(text)
        attempt, sizes = content["attempt"], {name: entry["size"] for name, entry in content["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CommitError(f"{manifest} is no manifest: expected attempt, and size of each of its files") from None
    if by != attempt:
        raise CommitError(f"{path / COMMIT} is not the mark of {manifest}")
    if strange := _names_outside(path, sizes):
        raise CommitError(
            f"{manifest} names {strange[0]!r:.200}; expected files below {path}, each by its shortest path, without {COMMIT} and {MANIFEST}"
        )
    return content


def leads_outside(name: str) -> bool:
    """Return whether a path, as a file gives it relative to its folder, is absolute or leads out of the folder by `..`."""
    return "\0" in name or name.startswith("/") or ".." in Path(name).parts


def _names_outside(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the paths, of those that the manifest of `folder` gives, that are none of its files.

    One leads out of it, by a symbolic link too. One that is spelled another way would be two objects of a store, and a mark is no file.
    """
    below = os.path.join(os.path.realpath(folder), "")
    return [one for one in names if not _is_file_name(one) or not os.path.realpath(folder / one).startswith(below)]


def _is_file_name(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a character
        return False
    return not leads_outside(name) and name == os.path.normpath(name) and name not in (".", COMMIT, MANIFEST)


def committed(parent: Path, number: Callable[[Path], Number | None]) -> list[Number]:
    """Return the numbers of the committed directories in `parent`, ascending."""
    paths = [parent / name for name in children(parent)]
    return sorted(value for path in paths if (value := number(path)) is not None and is_committed(path))


def discard(path: Path, fence: Fence = unfenced) -> None:
    """Remove a directory that others may be reading: it leaves its name at once and the disk soon after. Of a symbolic link, the link alone goes.

    Raises:
        CommitError: the fence objects; then the directory is where it was.
    """
    trash = path.with_name(f".trash-{path.name}.{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)
    try:
        os.rename(path, trash)
    except FileNotFoundError:
        return
    try:
        fence()
    except (CommitError, OSError):  # where it cannot be asked, it might have objected
        with suppress(OSError):  # another has taken the name meanwhile
            os.rename(trash, path)
        raise
    _pass("trash", path)
    if trash.is_symlink():
        trash.unlink()
    shutil.rmtree(trash, ignore_errors=True)


NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a filesystem without hard links answers."""
_PATIENCE_S = 5.0
_POLL_S = 0.05


def link(source: Path, target: Path) -> None:
    """Give `source` the name `target` too.

    Raises:
        FileExistsError: there is one; a rename would take its place.
        OSError: another reason, one of `NO_LINKS` where there are no hard links.
    """
    fault("link")
    os.link(source, target)


def place(source: Path, target: Path) -> None:
    """Move `source` to `target`, unless something is there: then delete it."""
    try:
        link(source, target)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _claim(source, target)
    finally:
        source.unlink(missing_ok=True)


def _claim(source: Path, target: Path) -> None:
    """Let the first one that claims `target` rename its file; who claims it and dies is waited for, but not for ever."""
    deadline = time.monotonic()
    try:
        os.close(os.open(target.with_name(f".{target.name}.claim"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        deadline += _PATIENCE_S
    while target.name not in os.listdir(target.parent):  # a network filesystem may remember that it was not there
        if time.monotonic() >= deadline:
            source.replace(target)
            return
        time.sleep(_POLL_S)
