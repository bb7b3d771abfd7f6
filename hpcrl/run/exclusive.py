"""A file that takes its place as a whole, and only if nobody else's has: a hard link, or where there are none a claim and a rename."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from hpcrl.run.fault import fault

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
