"""Explains errors of writing to a filesystem: the full or refused directory, the needed bytes, and a remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrl.errors import CommitError
from hpcrl.units import readable_size

_NOTHING = 4096
_FREE_UP = "make room (`hpcrl checkpoint ls` and `rm`, exports/, dumps/), then `hpcrl resume`; with a lower trainer.max_ckpts_to_keep it deletes more"
_REMEDIES = {
    errno.ENOSPC: _FREE_UP,
    errno.EDQUOT: f"this is your quota, which `quota` or the filesystem's own command shows: {_FREE_UP}",
    errno.EIO: "the filesystem or its server fails: tell its administrators, then `hpcrl resume`",
    errno.EROFS: "the filesystem is mounted read-only: tell its administrators, then `hpcrl resume`",
    errno.EACCES: "the run directory must belong to you and be writable",
}


def failure(path: Path, why: str, number: int | None = None, need: int | None = None) -> CommitError:
    """Return the error that names what could not be written, what it needs and what there is, and what to do.

    Args:
        number: errno of the failure, where it is known.
        need: bytes that `path` takes about.
    """
    lost = next((place for place in (path, *path.parents) if place.is_symlink() and not place.exists()), None)
    why = f"{lost} leads to {lost.readlink()}, which is not there" if lost else why
    needs = f"needs about {readable_size(need)}, " if need else ""
    free = _free(path)
    no_files = "; no more files fit, see `df -i`: delete some, of whatever size" if _free_files(path) == 0 else ""
    there = f" ({needs}{readable_size(free)} free{no_files})" if free is not None else ""
    remedy = _REMEDIES.get(number or 0, f"look at the filesystem; if it is full: {_FREE_UP}")
    return CommitError(f"{path} could not be written: {why}{there}. Earlier commits are untouched; {remedy}")


def exhausted(path: Path) -> str | None:
    """Return the error of a full filesystem at `path`; None where it is not full, or unknown. A quota is not seen by this."""
    free = _free(path)
    if free is not None and free < _NOTHING:
        return f"the filesystem of {path} is full ({readable_size(free)} free): {_FREE_UP}"
    return f"the filesystem of {path} takes no more files, see `df -i`: delete some" if _free_files(path) == 0 else None


def _free(path: Path) -> int | None:
    found = _statvfs(path)
    return found.f_bavail * found.f_frsize if found else None


def _free_files(path: Path) -> int | None:
    found = _statvfs(path)
    return found.f_favail if found and found.f_files else None


def _statvfs(path: Path) -> os.statvfs_result | None:
    for place in (path, *path.parents):
        try:
            return os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


@contextmanager
def explained(path: Path, need: int | None = None) -> Iterator[None]:
    """Turn an OSError into the CommitError of `failure`."""
    try:
        yield
    except OSError as error:
        raise failure(path, error.strerror or str(error), error.errno, need) from error


def require_space(path: Path, need: int | None) -> None:
    """Require `need` free bytes before they are written. A quota is not seen by this.

    Raises:
        CommitError: they are not.
    """
    free = _free(path)
    if need and free is not None and free < need:
        raise failure(path, "too little space", errno.ENOSPC, need)
