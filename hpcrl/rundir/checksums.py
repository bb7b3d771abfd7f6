"""Checksums of a run's configuration and code at submission, against unintended changes.

checksums.json is written by `hpcrl submit`, before anything is queued, and again by `hpcrl resume`, which tells what changed:

    {"config.toml": "0f34…", "code/jobs/train.py": "86ab…", …,
     "/home/me/study": {"mine/task.py": "71c2…", …},            a user's own modules, by the folder that they are imported from
     "blake2b": "413b…"}                                        of the text before it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError
from hpcrl.rundir.commit import checksums_of, children, read_bytes, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import parse_record, with_checksum

OwnFiles = Mapping[str, Sequence[str]]
"""Files outside the run directory: by folder, relative to it."""


def note_checksums(run: Run, own: OwnFiles) -> None:
    """Note configuration, code and a user's own files as they are now."""
    noted: dict[str, Any] = dict(_checksums(run.path, _of_run(run, lambda: None)))
    for folder, names in own.items():
        noted[folder] = _checksums(Path(folder), [Path(folder, name) for name in names])
    write_text(run.checksums, with_checksum(noted)[0])


def changed_files(run: Run, progress: Callable[[], object] = lambda: None) -> list[str]:
    """Return the changes of files since they were noted, a sentence each, by path in the run directory or absolute path.

    Args:
        progress: called at each file that was found and at each that was read.
    """
    changed, unseen = _changes(run, progress)
    return [*changed, *(f"{folder}, from which it imports, is missing" for folder in unseen)]


def _changes(run: Run, progress: Callable[[], object]) -> tuple[list[str], list[str]]:
    try:
        content = read_bytes(run.checksums)
        if content is None:
            return [f"{run.checksums.name} is missing"], []
        noted, _ = parse_record(content)
        own = {folder: dict(files) for folder, files in noted.items() if isinstance(files, dict)}
        files = {name: digest for name, digest in noted.items() if isinstance(digest, str)}
    except (ValueError, AttributeError):
        return [f"{run.checksums.name} is damaged"], []
    now, unseen = _checksums(run.path, _of_run(run, progress), progress), []
    for folder, of_folder in own.items():
        if not Path(folder).is_dir():
            unseen.append(folder)
            continue
        there = [path for name in of_folder if (path := Path(folder, name)).is_file()]
        files |= {str(Path(folder, name)): digest for name, digest in of_folder.items()}
        now |= {str(Path(folder, name)): digest for name, digest in _checksums(Path(folder), there, progress).items()}
    changed = [
        f"{name} {'is new' if name not in files else 'is missing' if name not in now else 'was changed'}"
        for name in sorted(now.keys() | files.keys())
        if now.get(name) != files.get(name)
    ]
    return changed, unseen


def require_unchanged(run: Run, progress: Callable[[], object] = lambda: None) -> None:
    """Let an attempt begin only with the configuration and the code that a person gave it.

    A folder of a user's own modules that this node does not have is passed over: they are imported from elsewhere, or cannot be.

    Args:
        progress: as for `changed_files`.

    Raises:
        DataError: one of the files is another.
    """
    if run.checksums.name not in children(run.path):  # an earlier version of hpcrl made the run
        return
    # a container need not have the folder of modules that are a part of its image
    if changed := _changes(run, progress)[0]:
        raise refusal(run, changed)


def refusal(run: Run, changed: Sequence[str]) -> DataError:
    """Return the error of an attempt that does not begin, as files are others than those of the run."""
    return DataError(
        f"{'; '.join(changed[:5])}{f'; {len(changed) - 5} more' if changed[5:] else ''}, since {run.name} was submitted or resumed. "
        f"Put it back, or `hpcrl resume {run.name}` to go on with it as it is now"
    )


def _of_run(run: Run, progress: Callable[[], object]) -> Iterator[Path]:
    if run.config.is_file():
        yield run.config
    # the listing has the types: a stat for each file takes a minute on a slow filesystem
    for folder, folders, names in os.walk(run.code, onerror=_refuse):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            progress()
            # neither what an editor nor what a network filesystem leaves
            if name[0] not in ".#" and name[-1] != "~":
                yield Path(folder, name)


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # files that are missing are found by their names
        raise error


def _checksums(folder: Path, files: Iterable[Path], progress: Callable[[], object] = lambda: None) -> dict[str, str]:
    paths, found = list(files), dict[str, str]()
    for path, digest in zip(paths, checksums_of(paths), strict=True):
        progress()
        found[str(path.relative_to(folder))] = digest
    return found
