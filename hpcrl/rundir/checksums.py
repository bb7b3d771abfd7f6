"""What a run was submitted with: checksums of its configuration and its code, against changes that nobody meant.

checksums.json is written by `hpcrl submit`, before anything is queued, and again by `hpcrl resume`, which tells what changed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hpcrl.errors import DataError
from hpcrl.rundir.commit import checksum, children, read_json, write_json
from hpcrl.rundir.layout import Run

_AT_ONCE = 8  # files that are read at the same time


def note_checksums(run: Run) -> None:
    """Note configuration and code as they are now."""
    write_json(run.checksums, _checksums(run))


def changed_files(run: Run, progress: Callable[[], object] = lambda: None) -> list[str]:
    """Return what became of files since they were noted, a sentence each, by path in the run directory.

    Args:
        progress: called at each file that was found and at each that was read.
    """
    try:
        noted = read_json(run.checksums)
        if noted is None:
            return [f"{run.checksums.name} is missing"]
        now, files = _checksums(run, progress), dict[str, str](noted)
    except (ValueError, TypeError):
        return [f"{run.checksums.name} is damaged"]
    return [
        f"{name} {'is new' if name not in files else 'is missing' if name not in now else 'was changed'}"
        for name in sorted(now.keys() | files.keys())
        if now.get(name) != files.get(name)
    ]


def require_unchanged(run: Run, progress: Callable[[], object] = lambda: None) -> None:
    """Let an attempt begin only with the configuration and the code that a person gave it.

    Args:
        progress: as for `changed_files`.

    Raises:
        DataError: one of the files is another.
    """
    if run.checksums.name not in children(run.path):  # an earlier version of hpcrl made the run
        return
    if changed := changed_files(run, progress):
        raise DataError(
            f"{'; '.join(changed[:5])}{f'; {len(changed) - 5} more' if changed[5:] else ''}, since {run.name} was submitted or resumed. "
            f"Put it back, or `hpcrl resume {run.name}` to go on with it as it is now"
        )


def _checksums(run: Run, progress: Callable[[], object] = lambda: None) -> dict[str, str]:
    files = [run.config] if run.config.is_file() else []
    for path in run.code.rglob("*"):
        progress()
        # neither what Python, an editor or a network filesystem leaves
        if path.is_file() and "__pycache__" not in path.parts and path.name[0] not in ".#" and path.name[-1] != "~":
            files.append(path)
    checksums = dict[str, str]()
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # a network filesystem reads many in hardly more time than one
        for path, found in zip(files, threads.map(checksum, files), strict=True):
            progress()
            checksums[str(path.relative_to(run.path))] = found
    return checksums
