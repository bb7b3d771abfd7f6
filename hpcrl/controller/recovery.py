"""Recovery of earlier attempts from disk: batches, finished groups and turns of others. The controller has no other memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcrl.config.scorers import REWARD, role_of
from hpcrl.controller.curriculum import Curriculum
from hpcrl.controller.evaluation import eval_prefix
from hpcrl.controller.prompt_stream import group_index
from hpcrl.data.batch_file import FIRST, batch_steps, check_batch, read_batch, read_batches
from hpcrl.data.cache_files import turn_files
from hpcrl.data.group_file import check_group, groups_of
from hpcrl.data.score_file import found_scores, read_rewards, remove_scores
from hpcrl.errors import DataError, RunError
from hpcrl.rundir.layout import Run
from hpcrl.types import Batch, GroupMeta


class SampleFiles:
    """Groups that each file of samples may still be needed for: the file is removed with the last."""

    def __init__(self) -> None:
        self._groups = defaultdict[str, set[str]](set)

    def add(self, group: GroupMeta) -> None:
        """Add a group that may be needed; one of an evaluation has no file of samples."""
        if group.kind == "train":
            self._groups[group.path].add(group.group_id)

    def forget(self, run: Run, names: Collection[str]) -> None:
        """Remove groups that are no longer needed."""
        for path, groups in list(self._groups.items()):
            groups.difference_update(names)
            if not groups:
                del self._groups[path]
                (run.path / path).unlink(missing_ok=True)


@dataclass
class History:
    """State that an earlier attempt left for this one.

    Attributes:
        composed: newest step whose batch is complete on disk, at least the step that training continues after.
        below: all groups with a smaller index are used.
        used: indices from `below` on of the other groups in those batches, and of those that were dropped or given up for them.
        finished: complete groups that no batch has used; some may be of the kind that dynamic sampling drops.
        files: of samples.
        batches: batches that training has still to do.
        checksum: of the newest batch's file.
        evaluated: rows that are finished of the evaluations that are not, by version and by their names.
        scores: digests of scores of finished groups: model -> id of the group -> digest.
        rewards: a reward model's scores of each sample, by the ids of the groups.
        curriculum: as those batches leave it; None: there is none.
    """

    composed: int
    below: int = 0
    used: set[int] = field(default_factory=set)
    finished: dict[int, GroupMeta] = field(default_factory=dict)
    files: SampleFiles = field(default_factory=SampleFiles)
    batches: dict[int, Batch] = field(default_factory=dict)
    checksum: str = FIRST
    evaluated: dict[int, dict[str, GroupMeta]] = field(default_factory=dict)
    scores: dict[str, dict[str, str]] = field(default_factory=dict)
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    curriculum: Curriculum | None = None

    def is_used(self, index: int) -> bool:
        return index < self.below or index in self.used

    def use(self, names: Iterable[str]) -> None:
        """Count groups as used; what a long run has used is one number and a few indices."""
        indices = {index for name in names if (index := group_index(name)) is not None}
        self.used |= {index for index in indices if index >= self.below}
        while self.below in self.used:
            self.used.remove(self.below)
            self.below += 1


def read_history(
    run: Run,
    step: int,
    batch_size: int,
    usable: Callable[[GroupMeta], bool],
    keep: Callable[[int, GroupMeta], bool],
    pruned: int = 0,
    models: Collection[str] = (),
    curriculum: Curriculum | None = None,
) -> History:
    """Read the state on disk for a training that continues after `step`.

    Batches that cannot be trained again, because a file is gone or damaged or a group is not usable, are removed with all later ones.
    Their groups may train in other batches now. Damaged groups that no batch has are removed, and generated again.

    A run that starts from another run's checkpoint has no batches of the steps before it: their groups count as used, in order.

    Args:
        usable: tells whether a group of a batch may train with the settings of now.
        keep: tells, given the next step to compose and a finished group, whether the group may still train.
        pruned: samples of the steps up to this one are removed; nothing will train them again.
        models: names of the scorers' models.
        curriculum: takes in the batches.

    Raises:
        DataError: the batch of a step that was trained is damaged or missing, or has no rows for the curriculum.
    """
    history, needed, files, inherited = History(step, curriculum=curriculum), set[str](), set[str](), True
    for file in read_batches(run, step):
        number = file.batch.step
        if inherited:
            history.below, inherited = (number - 1) * batch_size, False
        if number > step:
            if why := _unusable(run, file.batch, usable):
                print(f"the batch of step {number} is composed again: {why}", flush=True)
                break
            history.composed = number
            history.batches[number] = file.batch
        history.checksum = file.checksum
        history.use(file.batch.generated)
        if curriculum is not None:
            curriculum.fold(file.batch)
        if number > pruned:
            needed.update(file.batch.generated)
            files.update(group.path for group in file.batch.groups)
    if inherited:
        history.below = step * batch_size
    if curriculum is not None:
        curriculum.begin(history.below)
    again = [number for number in batch_steps(run) if number > history.composed]
    # with a curriculum the first of them stays until it is written over: a later attempt has to know of it too
    for number in again[curriculum is not None :]:
        run.batch(number).unlink()
    for path in run.samples.glob("*/g*.safetensors"):
        found = _read_samples(path, history, needed, keep)
        if not found and str(path.relative_to(run.path)) not in files:
            path.unlink()
    if curriculum is not None and again:
        curriculum.disregard(history.finished)
    _read_scores(run, history, needed, models)
    return history


def _read_samples(
    path: Path, history: History, needed: Collection[str], keep: Callable[[int, GroupMeta], bool]
) -> bool:
    """Note which groups of a file may train, or are `needed`; return whether there are any."""
    found = False
    for meta in _groups(path):
        index = group_index(meta.group_id)
        if index is not None and meta.group_id not in needed:
            if history.is_used(index) or not keep(history.composed + 1, meta) or not _is_whole(path, meta):
                continue
            history.finished[index] = meta
        history.files.add(meta)
        found = True
    return found


def _read_scores(run: Run, history: History, needed: Collection[str], models: Collection[str]) -> None:
    groups = {meta.group_id: meta for meta in history.finished.values()}
    remove_scores(run, lambda group: group not in needed and group not in groups)
    for model in models:
        history.scores[model] = digests = found_scores(run, model, groups)
        if role_of(model) == REWARD:
            named = (replace(groups[name], scores={model: digest}) for name, digest in digests.items())
            history.rewards |= {group.group_id: read_rewards(run, model, group) for group in named}


def remove_samples(run: Run, files: SampleFiles, steps: Iterable[int]) -> None:
    """Remove the samples of the groups that were generated for some steps, as far as no others are in their files."""
    batches = [read_batch(run.batch(step)) for step in steps]
    names = {name for file in batches if file for name in file.batch.generated}
    if names:
        files.forget(run, names)
        remove_scores(run, names.__contains__)


def _unusable(run: Run, batch: Batch, usable: Callable[[GroupMeta], bool]) -> str | None:
    for group in batch.groups:
        if not usable(group):
            return f"group {group.group_id} lacks what the settings of now ask of one"
    try:
        check_batch(run, batch)
    except (DataError, RunError) as error:
        return str(error)
    return None


def _groups(path: Path) -> Iterator[GroupMeta]:
    try:
        yield from groups_of(path)
    except DataError as error:
        print(error, flush=True)


def _is_whole(path: Path, meta: GroupMeta) -> bool:
    try:
        check_group(path, meta)
    except DataError as error:
        print(error, flush=True)
        return False
    return True


class BegunGroups:
    """Groups that were begun and not finished, with turns on disk."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._files: dict[str, dict[Path, int]] = {}
        self._versions: dict[int, Collection[int]] = {}

    def find(self, worker: str | None = None) -> None:
        """Find files that a worker, or any, has left."""
        for group, files in turn_files(self._run, worker).items():
            self._files.setdefault(group, {}).update(files)
            self._note(group)

    def restore(
        self, version: int, wanted: Callable[[int], bool], evaluated: Mapping[int, Collection[str]]
    ) -> Mapping[int, Collection[int]]:
        """Find files of earlier attempts, and remove those that cannot be used when training continues with `version`.

        Returns the versions that began files, for each training group that has any, by its index; it is kept up to date.

        Args:
            wanted: tells whether a training group, by its index, will be generated.
            evaluated: the rows that will not be, of each version that is to be evaluated.
        """
        self.find()
        for group, files in list(self._files.items()):
            index = group_index(group)
            evaluates = any(group.startswith(eval_prefix(at)) and group not in rows for at, rows in evaluated.items())
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
        """Remove the files of a group that is handed over."""
        if self._files.pop(group, None):
            self._note(group)

    def _note(self, group: str) -> None:
        index, files = group_index(group), self._files.get(group)
        if files and index is not None:
            self._versions[index] = set(files.values())
        elif index is not None:
            self._versions.pop(index, None)
