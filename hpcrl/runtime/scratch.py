"""Directories of a node's processes on its own disk, and the removal of those whose owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

from hpcrl.errors import RunError

_PREFIX = "hpcrl-"
_LOCK = "lock"
_SOCKET_PATH_MAX = 107
_SOCKET_NAME = 37  # a slash and a UUID, as vLLM names its inner sockets
_MADE = 9  # what mkdtemp adds


class Scratch:
    """A directory that only this user can enter, removed at the end or, after a SIGKILL, by the next one on the node.

    A lock tells whether its owner lives, whatever has become of the owner's process id, also in another container; it is taken before the
    directory gets the name by which others look for it.

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
            self.path = made.rename(parent / made.name.removeprefix("."))
        except OSError as error:
            raise RunError(f"no directory of its own for a process on this node: {error}; set TMPDIR to one") from error

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> list[Path]:
    """Remove what dead processes of this user, on this node, have left; return it."""
    parents = {Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")}
    found = [path for parent in sorted(parents) for path in parent.glob(f"{_PREFIX}*") if _is_abandoned(path)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def _is_abandoned(directory: Path) -> bool:
    """Return whether the owner of a directory is dead; one that another node, or another user, made is left to them."""
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
    except OSError:  # it is held, or the filesystem has no locks and cannot tell
        return False
    finally:
        os.close(lock)
    return True
