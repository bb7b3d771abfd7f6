"""Makes the work that workers are given: training groups with the rows that they train, and rows of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcrl.controller.admission import Admission
from hpcrl.controller.curriculum import Curriculum
from hpcrl.controller.dataset_rows import Mixture
from hpcrl.controller.evaluation import evaluation_work
from hpcrl.controller.prompt_stream import PromptStream, group_id
from hpcrl.controller.recovery import BegunGroups
from hpcrl.controller.schedule import Schedule
from hpcrl.types import Prompt, Work


class WorkMaker:
    """Makes work by the indices of groups, and by the rows of an evaluation.

    Args:
        train, validation, mixture: as of `Service`.
        begun: groups with turns on disk.

    Attributes:
        curriculum: chooses the rows that groups train; None: they follow the stream.
    """

    def __init__(
        self,
        schedule: Schedule,
        train: Sequence[Prompt],
        validation: Sequence[Prompt],
        mixture: Mixture | None,
        stream: PromptStream,
        admission: Admission,
        begun: BegunGroups,
    ) -> None:
        self._schedule, self._train, self._validation, self._mixture = schedule, train, validation, mixture
        self._stream, self._admission, self._begun = stream, admission, begun
        self.curriculum: Curriculum | None = None

    def row(self, position: int) -> int:
        """Return the row of the dataset at a position of the prompt stream."""
        row = self._stream.row(position)
        return self._mixture.row(self._stream.epoch(position), row) if self._mixture else row

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of a training group. Raises DataError where a function of the user's makes it, and fails."""
        return self._train[self.curriculum.row(index) if self.curriculum else self.row(index)]

    def train_work(self, index: int) -> Work:
        """Return a training group that a worker generates. Raises DataError as `prompt`."""
        prompt, seed = self.prompt(index), self._stream.sampling_seed(index)
        turns = self._begun.files(group_id(index), self._admission.version_of(index))
        return Work(group_id(index), "train", prompt, self._schedule.n_samples, seed, turns)

    def eval_work(self, version: int, rows: Sequence[int] | None = None) -> list[Work]:
        """Return rows of the evaluation of a version, all where None."""
        s = self._schedule
        return evaluation_work(self._validation, version, s.eval_n_samples, s.seed, rows, s.eval_settings)

    def eval_rows(self, version: int, rows: Sequence[int]) -> list[Work]:
        """Return rows of the evaluation of a version with the turns that earlier workers have left."""
        files = self._begun.files
        work = self.eval_work(version, rows)
        return [replace(one, turns=files(one.group_id, version), version=version) for one in work]
