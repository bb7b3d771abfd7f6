"""A node-local directory of one worker: the engine's sockets and temporary files, and the weights on their way in."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from hpcrl.errors import EngineError

_PREFIX = "hpcrl-"
_SOCKET_PATH_MAX = 107
_SOCKET_NAME = 37  # a slash and a UUID, as vLLM names its inner sockets


class Scratch:
    """A directory that only this user can enter, removed at the end or, after a SIGKILL, by the next worker on the node.

    A lock tells whether its owner lives; it is taken before the directory gets the name by which others look for it.

    Attributes:
        path: short enough for unix sockets in it.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) + len(_PREFIX) + 9 + _SOCKET_NAME > _SOCKET_PATH_MAX:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        try:
            made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        except OSError as error:
            raise EngineError(f"no node-local directory for the engine: {error}; set TMPDIR to one") from error
        self._lock = os.open(made / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(parent / made.name.removeprefix("."))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*/lock"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path.parent, ignore_errors=True)
        finally:
            os.close(lock)
