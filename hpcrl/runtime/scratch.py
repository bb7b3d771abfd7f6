"""Directories of a node's processes on its own disk, and the removal of those whose owners were killed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpcrl.config import InferenceEngineConfig
from hpcrl.envs.tools.python import discard_tree
from hpcrl.errors import ConfigError, RunError

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = ("psm_", "sem.mp-", "vllm_", "nccl-")
"""What the names of shared memory begin with: of Python's multiprocessing, vLLM and NCCL."""
_OF_TORCH, _FRESH_S = "torch_", 60.0
_PREFIX = "hpcrl-"
_LOCK = "lock"
_SHARED = "shared-memory"
_SOCKET_PATH_MAX = 107
_SOCKET_NAME = 37  # a slash and a UUID, as vLLM names its inner sockets
_MADE = 9  # what mkdtemp adds


class Scratch:
    """A directory that only this user can enter, removed at the end or, after a SIGKILL, by the next one on the node.

    A lock shows whether the directory's owner lives, also in another container and after its process id was reused. It is taken before the
    directory gets its final name.

    Args:
        of: what it is for, a part of its name.

    Attributes:
        path: short enough for unix sockets in it.

    Raises:
        RunError: no directory can be made.
    """

    def __init__(self, of: str) -> None:
        prefix, parent = f"{_PREFIX}{of}-", Path(tempfile.gettempdir())
        if len(str(parent)) + len(prefix) + _MADE + _SOCKET_NAME > _SOCKET_PATH_MAX:
            parent = Path("/tmp")
        remove_abandoned()
        try:
            made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
            self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            os.write(self._lock, socket.gethostname().encode())
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._kept = _keep(made)
            self.path = made.rename(parent / made.name.removeprefix("."))
        except OSError as error:
            raise RunError(f"no directory of its own for a process on this node: {error}; set TMPDIR to one") from error

    def take_temporary_files(self) -> None:
        """Let this process, and those that it starts from now on, make temporary files there."""
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.path)

    def remove(self) -> None:
        _discard(self.path)
        os.close(self._lock)
        os.close(self._kept)


def note_shared_memory(directory: Path, names: Iterable[str]) -> None:
    """Remove POSIX shared memory of these names together with the process's own directory."""
    (directory / _SHARED).write_text("".join(f"{name}\n" for name in sorted(names)))


def remove_shared_memory(directory: Path) -> None:
    """Remove what was noted; nothing that is another user's."""
    with suppress(FileNotFoundError):
        for name in (directory / _SHARED).read_text().splitlines():
            path = SHARED_MEMORY / Path(name).name
            with suppress(OSError):
                if path.lstat().st_uid == os.getuid():
                    path.unlink()
        (directory / _SHARED).unlink()


def mapped_shared_memory(pid: int) -> set[int]:
    """Return the inodes of the shared memory that a process has mapped. Raises OSError where it has ended, or is another user's."""
    lines = Path(f"/proc/{pid}/maps").read_bytes().split(b"\n")  # names need not be text
    return {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/".encode() in line}


def left_shared_memory() -> dict[str, int]:
    """Return names and bytes of this user's shared memory that no process has mapped which this one sees; one in another container, it does not."""
    mapped = set[int]()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            mapped |= mapped_shared_memory(int(pid))
    found, now = dict[str, int](), time.time()
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else []:
        with suppress(OSError):
            status, own = path.lstat(), path.name.startswith((*SEGMENTS, _OF_TORCH))
            if own and status.st_uid == os.getuid() and status.st_ino not in mapped:
                found |= {path.name: status.st_size} if now - status.st_mtime > _FRESH_S else {}
    return found


class SharedScratch:
    """A directory that processes of this user on this node share, removed by the last of them or, after SIGKILLs, by the next one on the node.

    Args:
        parent: is made where it is missing.
        of: what it is for and whose, a part of its name; the same for all that share it.

    Raises:
        RunError: it cannot be made, belongs to another user, or other users could replace it.
    """

    def __init__(self, parent: Path, of: str) -> None:
        self.path = parent / f"{_PREFIX}{of}-{socket.gethostname()}"
        try:
            while (lock := self._joined()) is None:
                pass
        except OSError as error:
            raise RunError(f"{self.path} cannot be used: {error.strerror}; choose another directory") from error
        self._lock, self._kept = lock, _keep(self.path)

    def _joined(self) -> int | None:
        """Return the lock, shared with the others; None where the last of them has just removed the directory."""
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        if _is_others(self.path.parent):
            raise PermissionError(errno.EPERM, "other users could replace it there")
        if self.path.is_symlink() or self.path.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "another user has made it")
        with suppress(FileNotFoundError):
            lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            os.pwrite(lock, socket.gethostname().encode(), 0)
            fcntl.flock(lock, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(self.path / _LOCK)):
                    return lock
            os.close(lock)
        return None

    def remove(self) -> None:
        """Leave it; the last one removes it."""
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _discard(self.path)
        os.close(self._lock)
        os.close(self._kept)


def _keep(directory: Path) -> int:
    """Return a lock on a directory, of which systemd-tmpfiles then removes nothing that is old (man tmpfiles.d); not every filesystem has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def _is_others(directory: Path) -> bool:
    """Return whether other users can rename what this user has in a directory: its owner, and those who may write to it."""
    found, mapped = directory.stat(), int(Path("/proc/sys/kernel/overflowuid").read_text())
    owners = (0, mapped, os.getuid())  # in a container, root outside of it is `mapped`
    return found.st_uid not in owners or bool(found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX)


def weight_copy_dir(engine: InferenceEngineConfig) -> Path | None:
    """Return where replicas on this node copy weights to; None: nowhere.

    Raises:
        ConfigError: the setting names an environment variable that the node lacks, or has empty.
    """
    if engine.weight_copy_dir is None:
        return None
    found = os.path.expandvars(os.path.expanduser(engine.weight_copy_dir))
    lacking = [name for name in re.findall(r"\$\{?(\w+)", engine.weight_copy_dir) if not os.environ.get(name)]
    if lacking or not os.path.isabs(found):
        raise ConfigError(
            "generator.inference_engine.weight_copy_dir: expected an absolute path whose variables the node has, found "
            f"{engine.weight_copy_dir!r}, which is {found!r} on {socket.gethostname()}"
        )
    return Path(found)


def remove_abandoned(*more: Path) -> list[Path]:
    """Remove what dead processes of this user, on this node, have left; return it.

    Args:
        more: directories to look into beside those for temporary files.
    """
    parents = {Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY, *more}
    return [path for parent in sorted(parents) for path in parent.glob(f"{_PREFIX}*") if _remove_abandoned(path)]


def _remove_abandoned(directory: Path) -> bool:
    """Remove a directory whose owners are dead; return whether it was one. What another node, or another user, made is left to them."""
    try:
        if directory.lstat().st_uid != os.getuid():
            return False
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # not one of these, or just removed
        return False
    try:
        if os.read(lock, 256).decode(errors="replace") != socket.gethostname():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _discard(directory)
    except OSError:  # it is held, or the filesystem has no locks and cannot tell
        return False
    finally:
        os.close(lock)
    return True


def _discard(directory: Path) -> None:
    """Remove a directory whose lock is held: the lock last, so that what a kill leaves is found again."""
    remove_shared_memory(directory)
    held = [path for path in directory.glob("*") if path.name != _LOCK]
    for paths in (held, [directory]):
        discard_tree(*paths)
