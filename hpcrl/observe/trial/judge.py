"""Judges a trial: when a look is due, which recipes cannot win any more, and the verdict."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean

from hpcrl.errors import DataError
from hpcrl.observe.evaluations import EvaluatedPrompt, Evaluation
from hpcrl.observe.scores import own_rewards
from hpcrl.observe.summary import EVAL_SCORE
from hpcrl.observe.trial.plan import Look, Trial, TrialFolder, scores_by_recipe
from hpcrl.observe.trial.statistics import RecipeDifference, difference, level_of_look, seeds_needed
from hpcrl.rundir.commit import children, read_json
from hpcrl.rundir.layout import Run, version_of
from hpcrl.rundir.ledger import read_attempts, read_outcome

LEAST_SHARE = 0.2
"""Of all training of a trial that lies between two looks at least."""
LATEST_SHARE = 0.9
"""After which only the last look is taken."""


@dataclass(frozen=True)
class PairVerdict:
    """What a look says of the leading recipe and another one.

    Attributes:
        kind: worse: the other's score is lower; cannot tell: the interval holds 0.
        found: of the leader less the other.
        level: of the interval.
    """

    leader: str
    other: str
    kind: str
    found: RecipeDifference
    level: float

    def needed(self, effect: float) -> int | None:
        """Return how many runs of each recipe find an effect, as of `seeds_needed`; None also where their spread is not known."""
        unknown = math.isnan(self.found.deviation)
        return None if unknown else seeds_needed(self.found.deviation, effect, self.level)

    def excludes(self, effect: float) -> bool:
        """Return whether the interval excludes a difference as large as `effect`."""
        return -effect < self.found.low and self.found.high < effect


def stopped_recipes(looks: Iterable[Look]) -> dict[str, Look]:
    """Return the recipes that were stopped, each with the look that did it."""
    return {recipe: look for look in looks for recipe in look.stopped}


def due_look(
    trial: Trial, looks: Sequence[Look], evaluated: Mapping[str, set[int]], over: Callable[[str], bool]
) -> tuple[int, float] | None:
    """Return the step and the share of a look that is due; None: none is, or the trial is over.

    When it comes depends on which runs have evaluated which steps, never on their scores.

    Args:
        evaluated: steps that each run has evaluated.
        over: whether a run, by its name, trains no more.
    """
    active = {name: runs for name, runs in trial.recipes.items() if name not in stopped_recipes(looks)}
    before = looks[-1].share if looks else 0.0
    if len(active) < 2 or before >= 1.0:
        return None
    runs = [run for own in active.values() for run in own]
    if all(trial.steps in evaluated[run] or over(run) for run in runs):
        return _last_step(trial, active, evaluated), 1.0
    shares = list[tuple[float, int]]()
    for step in trial.evaluated[:-1]:
        counts = [sum(step in evaluated[run] for run in own) for own in active.values()]
        if min(counts) >= 2:
            shares.append((sum(counts) / len(runs) * step / trial.steps, step))
    share, step = max(shares, default=(0.0, 0))
    return (step, share) if before + LEAST_SHARE <= share <= LATEST_SHARE else None


def _last_step(trial: Trial, active: Mapping[str, Sequence[str]], evaluated: Mapping[str, set[int]]) -> int:
    """Return the newest step that two runs of each recipe have evaluated, where runs failed or `trainer.epochs` ended them; else the last one."""
    steps = set[int]().union(*(evaluated[run] for own in active.values() for run in own)) - {0}
    shared = [step for step in steps if all(sum(step in evaluated[run] for run in own) > 1 for own in active.values())]
    return max(shared, default=trial.steps)


def take_looks(folder: TrialFolder, over: Callable[[str], bool] | None = None) -> list[Look]:
    """Take the look that is due, if one is, and return all looks.

    A last look is recorded where it compares the last step. One before it is taken again, as runs that failed may be resumed.

    Args:
        over: as of `due_look`; by default by the outcomes of the runs.

    Raises:
        DataError, RunError: the evaluations have no prompt in common, or a file is damaged.
    """
    trial, looks = folder.read(), folder.read_looks()
    names = [name for runs in trial.recipes.values() for name in runs]
    evaluated = {name: steps_evaluated(folder.run(name)) for name in names}

    def ended(name: str) -> bool:
        run = folder.run(name)
        outcome = read_outcome(run)
        if outcome is None or not outcome.final:
            return False
        return all(attempt.number <= outcome.attempt for attempt in read_attempts(run))  # it may have been resumed

    if due := due_look(trial, looks, evaluated, over or ended):
        counted = [name for name in names if due[0] in evaluated[name]]
        look = _look(folder, trial, looks, *due, counted)
        if look.last and not decides(trial, look):
            return [*looks, look]
        try:
            looks.append(folder.write(look))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            looks.append(look)  # somebody else's trial, whose own runs decide
    return looks


def decides(trial: Trial, look: Look) -> bool:
    """Return whether a look is the last one, and compares the last step: none after it can say otherwise."""
    compares = any(math.isfinite(one.found.low) for one in verdicts(trial, look))
    return look.last and compares and look.step == trial.steps


def steps_evaluated(run: Run) -> set[int]:
    """Return the steps whose evaluations are over."""
    versions = (version_of(run.evals / name) for name in children(run.evals))
    return {version for version in versions if version is not None and run.eval_summary(version).exists()}


def _look(
    folder: TrialFolder, trial: Trial, looks: Sequence[Look], step: int, share: float, counted: Sequence[str]
) -> Look:
    stopped = stopped_recipes(looks)
    own = [name for recipe, runs in trial.recipes.items() if recipe not in stopped for name in runs if name in counted]
    scores, resolution, prompts = common_scores([Evaluation.read(folder.run(name), step) for name in own])
    halfway = min((other for other in trial.evaluated if other < step), key=lambda at: abs(at - step / 2), default=0)
    earlier = scores_by_recipe(
        trial, {name: at for name in own if (at := score_of(folder.run(name), halfway)) is not None}
    )
    look = Look(
        number=len(looks) + 1,
        time=time.time(),
        step=step,
        share=share,
        before=looks[-1].share if looks else 0.0,
        scores={recipe: of for recipe, of in scores_by_recipe(trial, scores).items() if recipe not in stopped},
        earlier={recipe: fmean(of.values()) for recipe, of in earlier.items() if of},
        earlier_step=halfway,
        resolution=resolution,
        prompts=prompts,
        stopped=[],
    )
    return replace(look, stopped=beaten(trial, look))


def common_scores(evaluations: Sequence[Evaluation]) -> tuple[dict[str, float], float, int]:
    """Return the mean score of each run over the prompts that all have, what one sample changes in it, and how many these are.

    Raises:
        DataError: they have none in common.
    """
    prompts = {one.run.name: one.by_prompt() for one in evaluations}
    first = next(iter(prompts.values()), {})
    common = [key for key in first if all(key in own and own_rewards(own[key]) for own in prompts.values())]
    if evaluations and not common:
        raise DataError(f"{', '.join(prompts)} have evaluated no prompt in common, so their scores cannot be compared")
    rewards = [reward for own in prompts.values() for key in common for reward in own_rewards(own[key])]
    samples = min((_samples(own, common) for own in prompts.values()), default=1)
    scores = {name: fmean(own[key].mean_reward for key in common) for name, own in prompts.items()}
    return scores, (max(rewards, default=0.0) - min(rewards, default=0.0)) / samples, len(common)


def _samples(prompts: Mapping[tuple[str, str, int], EvaluatedPrompt], common: Iterable[tuple[str, str, int]]) -> int:
    return sum(len(own_rewards(prompts[key])) for key in common)


def score_of(run: Run, step: int) -> float | None:
    """Return the mean score of an evaluation over all its prompts; None where there is none."""
    with suppress(ValueError):
        metrics = read_json(run.eval_summary(step))
        score = metrics.get(EVAL_SCORE) if isinstance(metrics, dict) else None
        return float(score) if isinstance(score, int | float) and math.isfinite(score) else None
    return None


def leader_of(look: Look) -> str | None:
    """Return the recipe with the highest mean score; None where no recipe has a score."""
    means = {recipe: fmean(look.of(recipe)) for recipe in look.scores if look.of(recipe)}
    return max(means, key=lambda recipe: means[recipe], default=None)


def verdicts(trial: Trial, look: Look) -> list[PairVerdict]:
    """Return what a look says of the leader and of each other recipe that it compared."""
    leader, level = leader_of(look), level_of_look(look.share, look.before, len(trial.recipes))
    if leader is None:
        return []
    return [_verdict(look, leader, other, level) for other in look.scores if other != leader and look.of(other)]


def _verdict(look: Look, leader: str, other: str, level: float) -> PairVerdict:
    found = difference(look.of(other), look.of(leader), level, look.resolution)
    return PairVerdict(leader, other, "worse" if found.low > 0 else "cannot tell", found, level)


def beaten(trial: Trial, look: Look) -> list[str]:
    """Return the recipes that a look stops because they cannot win any more: worse than the leader, and too slow to catch up.

    The last look stops none. One would catch up if it went on to close the gap at the pace at which it has since `earlier_step`, up to the last step.
    """
    if look.last:
        return []
    return [one.other for one in verdicts(trial, look) if one.kind == "worse" and not _catches_up(trial, look, one)]


def _catches_up(trial: Trial, look: Look, pair: PairVerdict) -> bool:
    if pair.leader in look.earlier and pair.other in look.earlier:
        earlier = look.earlier[pair.leader] - look.earlier[pair.other]
    else:
        earlier = 0.0
    closing = (earlier - pair.found.mean) / (look.step - look.earlier_step)
    return closing * (trial.steps - look.step) >= pair.found.mean
