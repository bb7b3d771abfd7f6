"""Lets a Unix group read a run (slurm.readable_by), all but its secrets."""

from __future__ import annotations

import grp
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcrl.config.errors import Problem
from hpcrl.errors import RunError

SECRETS = "secrets"
"""Folder of a run directory that nobody else may enter."""
_PRIVATE, _SHARED = 0o077, 0o027


def umask_of(group: str | None) -> int:
    """Return the umask with which a run writes that a group, or nobody else, may read."""
    return _PRIVATE if group is None else _SHARED


@contextmanager
def writing_for(group: str | None) -> Iterator[None]:
    """Let this process write files that the group may read as far as their directories give it to them."""
    before = os.umask(umask_of(group)) if group is not None else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


@contextmanager
def made_for(group: str | None, folder: Path) -> Iterator[None]:
    """Make a folder with its missing parents, for this user and the group, and let this process write into it what the group may read.

    Where it cannot be given to the group, as on a machine without that, it is for this user alone, and a line says why. An error within
    leaves no empty folder.
    """
    refused = next((f"{problem.path}: {problem.message}" for problem in check_group(group)), None)
    with writing_for(None if refused else group):
        folder.mkdir(parents=True, mode=0o700)
        if group is not None and refused is None:
            try:
                share(folder, group)
            except RunError as error:
                refused = str(error)
        if refused:
            print(f"hpcrl: {refused}. Only you can read {folder}", file=sys.stderr)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                folder.rmdir()
            raise


def check_group(group: str | None) -> Iterator[Problem]:
    """Yield what keeps this user from giving files to the group."""
    if group is None:
        return
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        yield Problem("slurm.readable_by", f"there is no group {group} here; {_yours()}")
        return
    if os.geteuid() and number not in (os.getegid(), *os.getgroups()):
        yield Problem("slurm.readable_by", f"you are not in the group {group}; {_yours()}")


def _yours() -> str:
    names = list[str]()
    for number in sorted({os.getegid(), *os.getgroups()}):
        try:
            names.append(grp.getgrgid(number).gr_name)
        except KeyError:
            names.append(str(number))
    return f"`id -Gn` lists yours: {', '.join(names)}"


def share(folder: Path, group: str | None) -> None:
    """Let a group read a folder with all that is in it, and what is made in it later; None: let nobody else read it.

    Directories get the setgid bit, by which new files belong to the group. Symbolic links are not followed.

    Raises:
        RunError: the filesystem refuses.
    """
    number = -1 if group is None else grp.getgrnam(group).gr_gid
    try:
        for path, folders, files in os.walk(folder):
            os.chown(path, -1, number)
            os.chmod(path, 0o2750 if group else 0o700)
            if SECRETS in folders:
                folders.remove(SECRETS)
            for file in (os.path.join(path, name) for name in files):
                if not os.path.islink(file):
                    mode = os.stat(file).st_mode
                    os.chown(file, -1, number)
                    os.chmod(file, (mode & 0o700) | (mode >> 3 & 0o050 if group else 0))
    except FileNotFoundError:  # the run has removed it meanwhile
        pass
    except OSError as error:
        raise RunError(
            f"slurm.readable_by: {error.filename} could not be given to {group}: {error.strerror}"
        ) from error


def closed_above(folder: Path, group: str) -> list[Path]:
    """Return the directories above a run through which the group cannot pass."""
    number = grp.getgrnam(group).gr_gid
    return [path for path in folder.absolute().parents if not _lets_through(path, number)]


def _lets_through(path: Path, number: int) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return True  # another error is raised for it
    return bool(found.st_mode & (0o010 if found.st_gid == number else 0o001))
