"""Finds the runs of all users, for `hpcrl status --all-users`."""

from __future__ import annotations

import os
import pwd
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from hpcrl.launch.scheduler import jobs_of_runs

_PATTERN = frozenset("*?[")


def owner_of(path: Path) -> int | None:
    """Return the user id of the owner of a directory; None where it is gone."""
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def user_name(uid: int | None) -> str:
    """Return the name of a user, or the number of one who has no account any more."""
    try:
        return pwd.getpwuid(uid).pw_name if uid is not None else "?"
    except KeyError:
        return str(uid)


def is_folder(path: Path | os.DirEntry[str]) -> bool:
    """Return whether there is a directory; a symbolic link to one that this user may not see counts as none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def roots_of(pattern: Path) -> tuple[list[Path], list[Path]]:
    """Return the directories that match a pattern such as /scratch/*/runs, and those on the way that this user may not enter.

    Each directory on the way is listed once; nothing below the pattern is read.
    """
    found, closed = [Path(pattern.absolute().anchor)], list[Path]()
    for part in pattern.absolute().parts[1:]:
        below = list[Path]()
        for folder in found:
            is_pattern = bool(_PATTERN & set(part))
            if not os.access(folder, os.R_OK | os.X_OK if is_pattern else os.X_OK, effective_ids=True):
                closed.append(folder)
            elif not is_pattern:
                below += [folder / part] if is_folder(folder / part) else []
            else:
                below += [folder / name for name in _matching(folder, part)]
        found = below
    return found, closed


def _matching(folder: Path, part: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if is_folder(entry) and fnmatchcase(entry.name, part) and (entry.name[0] != "." or part[0] == ".")
        )


def describe_unreadable(paths: Sequence[Path]) -> Iterator[str]:
    """Yield a line per owner of directories that this user may not read: how many, and which jobs of runs Slurm shows."""
    owners = Counter(map(owner_of, paths))
    uids = [uid for uid in owners if uid is not None]
    shown = Counter(jobs_of_runs(uids) if uids else [])
    for uid, count in sorted(owners.items(), key=lambda one: user_name(one[0])):
        name = user_name(uid)
        states = "".join(
            f", {n} {state.lower()} in Slurm" for (user, state), n in sorted(shown.items()) if user == name
        )
        what = "directory" if count == 1 else "directories"
        yield f"{name:12} {count} {what} that you may not read{states}"
