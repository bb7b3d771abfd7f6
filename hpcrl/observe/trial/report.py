"""Describes a trial as JSON values and as lines: its verdict, recipes, curves and node hours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from hpcrl.observe.goodput import account_of
from hpcrl.observe.summary import EVAL_SCORE
from hpcrl.observe.trial.judge import (
    LEAST_SHARE,
    PairVerdict,
    decides,
    leader_of,
    score_of,
    steps_evaluated,
    stopped_recipes,
    take_looks,
    verdicts,
)
from hpcrl.observe.trial.plan import Look, Trial, TrialFolder
from hpcrl.observe.trial.statistics import ALPHA, POWER

_HOUR = 3600.0


def describe_trial(folder: TrialFolder, over: Callable[[str], bool] | None = None) -> dict[str, Any]:
    """Return what is known of a trial, after the look that is due.

    Args:
        over: as of `take_looks`.

    Returns:
        `state`: running; decided where no later look can change the verdict; unfinished where runs ended before the last step, and resumed
        ones may change it. `recipes`: by name; `curves`: of each recipe the
        mean, lowest and highest score of its runs by step. `node_hours`, and `full_sweep`, an estimate: of all runs, had each trained to the end.
    """
    trial, looks = folder.read(), take_looks(folder, over)
    stopped = stopped_recipes(looks)
    curves = {recipe: _curve(folder, runs) for recipe, runs in trial.recipes.items()}
    hours = {recipe: _hours(folder, runs) for recipe, runs in trial.recipes.items()}
    decided = len(trial.recipes) - len(stopped) < 2 or any(decides(trial, look) for look in looks)
    unfinished = not decided and any(look.last for look in looks)
    return {
        "name": folder.name,
        "project": folder.project.name,
        "state": "decided" if decided else "unfinished" if unfinished else "running",
        "effect": trial.effect,
        "alpha": ALPHA,
        "power": POWER,
        "steps": trial.steps,
        "seeds": trial.seeds,
        "verdict": verdict_lines(trial, looks, decided=decided),
        "pairs": [_pair(trial, look, one) for look, one in pairs(trial, looks)],
        "recipes": {
            recipe: {
                "runs": runs,
                "stopped": stopped[recipe].step if recipe in stopped else None,
                "node_hours": hours[recipe],
                "score": curves[recipe][-1] if curves[recipe] else None,
            }
            for recipe, runs in trial.recipes.items()
        },
        "looks": [
            {"number": one.number, "step": one.step, "share": one.share, "prompts": one.prompts, "stopped": one.stopped}
            for one in looks
        ],
        "node_hours": sum(hours.values()),
        "full_sweep": _full_sweep(folder, trial),
        "curves": curves,
    }


def pairs(trial: Trial, looks: Sequence[Look]) -> list[tuple[Look, PairVerdict]]:
    """Return what stands of each pair of the leader and another recipe: the look that stopped the other one, else the newest."""
    found = [(look, one) for look in looks for one in verdicts(trial, look) if one.other in look.stopped]
    return (
        found + [(looks[-1], one) for one in verdicts(trial, looks[-1]) if one.other not in looks[-1].stopped]
        if looks
        else []
    )


def verdict_lines(trial: Trial, looks: Sequence[Look], *, decided: bool) -> list[str]:
    """Return the verdict of a trial, a sentence for each pair of the leader and another recipe."""
    if not looks:
        return [
            f"no look yet: the first comes when {LEAST_SHARE:.0%} of all training is done and two runs of each recipe are there"
        ]
    lines = [_sentence(trial, look, one) for look, one in pairs(trial, looks)]
    compared = {name for look, one in pairs(trial, looks) for name in (one.leader, one.other)}
    lines += [
        f"{name}: no run has the score of step {looks[-1].step}" for name in trial.recipes if name not in compared
    ]
    leader = leader_of(looks[-1])
    if (
        decided
        and leader
        and all(one.kind == "worse" for _, one in pairs(trial, looks))
        and len(compared) == len(trial.recipes)
    ):
        return [f"{leader} is the best of {len(trial.recipes)} recipes", *lines]
    if looks[-1].last and not decided:
        return [f"not decided: runs ended before step {trial.steps}, and resumed ones may change this", *lines]
    return lines if decided else [f"not decided yet, after look {looks[-1].number}", *lines]


def _sentence(trial: Trial, look: Look, pair: PairVerdict) -> str:
    found, counts = pair.found, " and ".join(str(len(look.of(name))) for name in (pair.leader, pair.other))
    if not math.isfinite(found.low):
        return f"cannot tell {pair.leader} from {pair.other}: fewer than two runs of one of them have the score of step {look.step}"
    measured = f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}] at step {look.step}, {counts} runs"
    if pair.kind == "worse":
        ended = ", and was stopped" if pair.other in look.stopped else ""
        return f"{pair.other} is worse than {pair.leader}{ended}: {measured}"
    lines = f"cannot tell {pair.leader} from {pair.other}: {measured}"
    if pair.excludes(trial.effect):
        return f"{lines}; a difference of {trial.effect:g} is excluded"
    needed = f"about {count} seeds" if (count := pair.needed(trial.effect)) else "more than 1000 seeds"
    return f"{lines}; {trial.effect:g} would be found with {needed} of each"


def _pair(trial: Trial, look: Look, pair: PairVerdict) -> dict[str, Any]:
    known = math.isfinite(pair.found.low)
    return {
        "leader": pair.leader,
        "other": pair.other,
        "verdict": pair.kind,
        "step": look.step,
        "difference": pair.found.mean,
        "interval": [pair.found.low, pair.found.high] if known else None,
        "deviation": pair.found.deviation if known else None,
        "seeds_needed": pair.needed(trial.effect),
    }


def _curve(folder: TrialFolder, runs: Sequence[str]) -> list[dict[str, Any]]:
    scores = dict[int, list[float]]()
    for run in map(folder.run, runs):
        for step in steps_evaluated(run):
            if (score := score_of(run, step)) is not None:
                scores.setdefault(step, []).append(score)
    return [
        {
            "step": step,
            "mean": fmean(own),
            "low": min(own),
            "high": max(own),
            "deviation": stdev(own) if len(own) > 1 else None,
            "runs": len(own),
        }
        for step, own in sorted(scores.items())
    ]


def _hours(folder: TrialFolder, runs: Sequence[str]) -> float:
    accounts = [account_of(run) for run in map(folder.run, runs) if run.config.is_file()]
    return sum(account.total for account in accounts if account) / _HOUR


def _full_sweep(folder: TrialFolder, trial: Trial) -> float | None:
    """Return the node hours of all runs, if each took as many as those that trained to the end; None where none has."""
    names = [name for runs in trial.recipes.values() for name in runs]
    whole = [name for name in names if trial.steps in steps_evaluated(folder.run(name))]
    return _hours(folder, whole) / len(whole) * len(names) if whole else None


def trial_lines(found: Mapping[str, Any]) -> list[str]:
    """Return a trial as of `describe_trial` as lines for the terminal."""
    lines = [f"{found['project']}/{found['name']}: {found['state']}", *(f"  {line}" for line in found["verdict"]), ""]
    for name, recipe in found["recipes"].items():
        score, stopped = recipe["score"], recipe["stopped"]
        at = (
            f"{EVAL_SCORE} {score['mean']:.4f} ({score['low']:.4f} to {score['high']:.4f}) at step {score['step']}"
            if score
            else "no score"
        )
        end = f", stopped at step {stopped}" if stopped is not None else ""
        lines.append(f"  {name:24}  {len(recipe['runs'])} runs  {at}{end}  {recipe['node_hours']:.2f} node hours")
    full = f", of about {found['full_sweep']:.2f} of the full sweep" if found["full_sweep"] else ""
    return [
        *lines,
        "",
        f"  {found['node_hours']:.2f} node hours{full}; errors of {found['alpha']:.0%} over all looks and pairs",
    ]
