"""A teacher in an inference engine beside its scorer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from hpcrl.config import Config
from hpcrl.config.backend import teacher_backend
from hpcrl.config.scorers import ScorerSet
from hpcrl.data.alignment import TokenAligner
from hpcrl.rundir.layout import Run
from hpcrl.trainer.scoring.worker import Judge


class TeacherBackend(Protocol):
    """The module `teacher` of an engine that returns the log-probabilities of prompts."""

    def engine_teacher(
        self,
        run: Run,
        config: Config,
        scorers: ScorerSet,
        aligner: TokenAligner | None,
        log: Path,
        still_waiting: Callable[[], None],
    ) -> AbstractContextManager[Judge]:
        """Have the teacher of one scorer within the `with` statement, once its engine is ready.

        Args:
            aligner: writes samples in the teacher's tokens (`in_teacher_tokens` of hpcrl/trainer/scoring/aligned.py); None: it reads the policy's.
            log: file of what the engine's own processes say.
            still_waiting: called now and then while it starts.

        Raises:
            EngineError: it does not start.
        """
        ...


def engine_of_teacher(config: Config) -> TeacherBackend:
    """Return the engine of a run whose teacher is in one."""
    backend = teacher_backend(config.trainer.distillation)
    assert backend is not None, config.trainer.distillation.backend
    return cast(TeacherBackend, backend.layer("teacher"))
