"""Groups that somebody has begun and not finished, as far as turns of them are on the disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from hpcrl.controller.evaluation import eval_prefix
from hpcrl.controller.prompt_stream import group_index
from hpcrl.data.turn_file import turn_files
from hpcrl.rundir.layout import Run


class BegunGroups:
    """The files of these groups."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._files: dict[str, dict[Path, int]] = {}
        self._versions: dict[int, Collection[int]] = {}

    def find(self, worker: str | None = None) -> None:
        """Look for files that a worker, or any, has left."""
        for group, files in turn_files(self._run, worker).items():
            self._files.setdefault(group, {}).update(files)
            self._note(group)

    def restore(
        self, version: int, wanted: Callable[[int], bool], evaluated: Collection[str] = ()
    ) -> Mapping[int, Collection[int]]:
        """Look for what earlier attempts have left, and remove what cannot be used when training continues with `version`.

        Returns the versions that began files, for each training group that has any, by its index; it is kept up to date.

        Args:
            wanted: tells whether a training group, by its index, will be generated.
            evaluated: rows of the evaluation that will not be.
        """
        self.find()
        for group, files in list(self._files.items()):
            index = group_index(group)
            evaluates = group.startswith(eval_prefix(version)) and group not in evaluated
            useful = evaluates if index is None else wanted(index)
            for path in [path for path, began in files.items() if began > version or not useful]:
                path.unlink(missing_ok=True)
                del files[path]
            self._note(group)
        return self._versions

    def files(self, group: str, version: int) -> list[str]:
        """Return the files of a group that `version` or a newer one has begun, relative to the run directory."""
        found = self._files.get(group, {})
        return sorted(str(path.relative_to(self._run.path)) for path, began in found.items() if began >= version)

    def forget(self, group: str) -> None:
        """Whoever generated a group has handed it over, and removes its files."""
        if self._files.pop(group, None):
            self._note(group)

    def _note(self, group: str) -> None:
        index, files = group_index(group), self._files.get(group)
        if files and index is not None:
            self._versions[index] = set(files.values())
        elif index is not None:
            self._versions.pop(index, None)
