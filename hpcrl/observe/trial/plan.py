"""Reads and writes the records of a trial: its plan, and its looks, each of which is taken once.

<root>/<project>/.slurm/<name>/trial.json             the recipes, and their runs
<root>/<project>/.slurm/<name>/looks/000001.json      what the first look found, and which recipes it stopped

The runs of a trial are the elements of one submission, and share its folder, which each finds by its link `slurm`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcrl.errors import RunError
from hpcrl.rundir.commit import children, make_directory, place, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import as_record, damaged, read_object, with_checksum

_LOOK = re.compile(r"(\d{6,})\.json", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLAN = "restore it from a backup: without it the runs are those of a sweep, which nothing compares"
_LARGEST = 1e100  # whose square is still a number
_LOOK_LOST = "restore it from a backup; removed, it is taken again, at the scores that there are then"


@dataclass(frozen=True)
class Trial:
    """Plan of a trial.

    Attributes:
        recipes: names of the runs of each recipe, by the recipe's name.
        steps: of each run.
        interval: steps between evaluations.
        effect: the least difference of scores that matters.
    """

    recipes: dict[str, list[str]]
    steps: int
    interval: int
    effect: float

    @property
    def evaluated(self) -> list[int]:
        """The steps that are evaluated, the last one too."""
        return [*range(self.interval, self.steps, self.interval), self.steps]

    @property
    def seeds(self) -> int:
        return max(map(len, self.recipes.values()))


@dataclass(frozen=True)
class Look:
    """What a look at a trial found: all that its verdicts follow from.

    Attributes:
        number: 1 for the first.
        time: Unix time.
        step: whose scores were compared.
        share: of all training of the trial, done by then; 1: the last look.
        before: the same at the look before it, or 0.
        scores: of the runs of each recipe that were compared, by the recipe and the run, over the prompts that all of them have.
        earlier: mean score of each recipe at `earlier_step`, about half of `step`; empty where it is not known.
        resolution: what one sample changes in a score.
        prompts: that all runs have.
        stopped: recipes that this look stopped.
    """

    number: int
    time: float
    step: int
    share: float
    before: float
    scores: dict[str, Any]
    earlier: dict[str, Any]
    earlier_step: int
    resolution: float
    prompts: int
    stopped: list[str]

    @property
    def last(self) -> bool:
        return self.share >= 1.0

    def of(self, recipe: str) -> list[float]:
        """Return the scores of a recipe's runs."""
        return [*self.scores[recipe].values()]


@dataclass(frozen=True)
class TrialFolder:
    """The folder of a trial's submission."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def project(self) -> Path:
        return self.path.parent.parent

    @property
    def plan(self) -> Path:
        return self.path / "trial.json"

    @property
    def looks(self) -> Path:
        return self.path / "looks"

    def run(self, name: str) -> Run:
        return Run(self.project / name)

    def read(self) -> Trial:
        """Return the plan. Raises RunError where there is none, or it is damaged."""
        value = read_object(self.plan, _PLAN)
        if value is None:
            raise RunError(f"{self.path} is no trial: it has no {self.plan.name}")
        trial = as_record(Trial, value, self.plan, _PLAN)
        names = [name for runs in trial.recipes.values() for name in runs]
        if len(trial.recipes) < 2 or not all(map(_NAME.fullmatch, names)) or min(trial.steps, trial.interval) < 1:
            raise damaged(self.plan, "expected the runs of two recipes, and numbers of steps", _PLAN)
        return trial

    def read_looks(self) -> list[Look]:
        """Return the looks in their order. Raises RunError where one is damaged."""
        numbers = sorted(int(match[1]) for name in children(self.looks) if (match := _LOOK.fullmatch(name)))
        return [self._read_look(number) for number in numbers]

    def _read_look(self, number: int) -> Look:
        path = self.looks / f"{number:06d}.json"
        look = as_record(Look, read_object(path, _LOOK_LOST), path, _LOOK_LOST)
        tables = [look.earlier, *look.scores.values()]
        if not all(isinstance(one, dict) and all(map(_is_score, one.values())) for one in tables):
            raise damaged(path, "a score is no number", _LOOK_LOST)
        if not 0.0 <= look.before < look.share <= 1.0:  # else no level belongs to it
            raise damaged(path, f"share {look.share:g} after {look.before:g}", _LOOK_LOST)
        return look

    def write(self, look: Look) -> Look:
        """Write a look, unless one of this number is there; return the one that is. Of several that look at once, one decides."""
        make_directory(self.looks)
        target = self.looks / f"{look.number:06d}.json"
        beside = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
        write_text(beside, with_checksum(asdict(look))[0])
        place(beside, target)
        return self._read_look(look.number)


def _is_score(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def write_plan(folder: Path, trial: Trial) -> None:
    write_text(TrialFolder(folder).plan, with_checksum(asdict(trial))[0])


def trial_of(run: Run) -> TrialFolder | None:
    """Return the trial that a run is in; None: it is in none."""
    folder = TrialFolder(Path(os.path.realpath(run.slurm)))
    return folder if folder.plan.is_file() else None


def find_trial(name: str, root: Path) -> TrialFolder:
    """Return the trial of this name, or `project/name`. Raises RunError where none, or several, match."""
    project, _, own = name.rpartition("/")
    found = [folder for folder in all_trials(root) if folder.name == own and project in ("", folder.project.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RunError(f"several trials are called {name}: name one with its project, as {found[0].project.name}/{own}")
    raise RunError(f"no trial {name!r} under {root.absolute()}; `hpcrl status` lists the runs there, or give --root")


def all_trials(root: Path) -> list[TrialFolder]:
    """Return the trials under a root that this user can read, by project and name."""
    projects = [root.absolute() / name for name in sorted(children(root))]
    folders = [project / ".slurm" / name for project in projects for name in sorted(_names(project / ".slurm"))]
    return [TrialFolder(folder) for folder in folders if os.path.isfile(folder / "trial.json")]


def _names(folder: Path) -> Sequence[str]:
    try:
        return children(folder)
    except OSError:  # somebody else's
        return ()


def scores_by_recipe(trial: Trial, scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the scores of runs by recipe and run, in the order of the plan."""
    return {recipe: {run: scores[run] for run in runs if run in scores} for recipe, runs in trial.recipes.items()}
