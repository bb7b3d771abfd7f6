"""Simulated trials: how often a verdict is false, how often a difference is found, and the share of the full sweep's steps that it took.

    python benchmarks/trials.py [--times 4000]

Scores are drawn as in reinforcement learning with rewards of 0 and 1. A run's policy improves by an exponential curve; its end differs from
the recipe's by a normal draw, which is the spread between seeds, and grows in with training. Prompts differ in difficulty, one sample each.
When looks come, what they find and which recipes they stop is decided by hpcrl's own functions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpcrl.observe.trial.judge import beaten, due_look, stopped_recipes, verdicts
from hpcrl.observe.trial.plan import Look, Trial, scores_by_recipe

STEPS, INTERVAL = 100, 10
START, END = 0.3, 0.6
HARDNESS = 1.5
"""Standard deviation of the difficulties of prompts, in logits."""


@dataclass(frozen=True)
class Case:
    """Trials of one kind.

    Attributes:
        deficits: of each recipe, how much lower its score is at the end.
        spread: standard deviation between seeds at the end, of each recipe.
        collapse: share of runs that end at a score of 0.05.
        at_once: runs that train at the same time; 0: all.
    """

    deficits: tuple[float, ...]
    seeds: int
    spread: tuple[float, ...] = (0.02, 0.02)
    prompts: int = 256
    collapse: float = 0.0
    at_once: int = 0

    @property
    def trial(self) -> Trial:
        names = {f"r{at}": [f"r{at}-{seed}" for seed in range(self.seeds)] for at in range(len(self.deficits))}
        return Trial(names, STEPS, INTERVAL, 0.02)


@dataclass(frozen=True)
class Found:
    """Of one trial.

    Attributes:
        pairs: of recipes, the better one first, that a verdict tells apart.
        steps: share of all runs' steps that were trained.
    """

    pairs: frozenset[tuple[str, str]]
    stopped: int
    steps: float


def drawn_scores(case: Case, generator: np.random.Generator) -> dict[str, dict[int, float]]:
    """Return the scores of each run by step."""
    trial = case.trial
    steps = np.array(trial.evaluated)
    share = (1 - np.exp(-3 * steps / STEPS)) / (1 - np.exp(-3))
    hardness = generator.normal(0, HARDNESS, case.prompts)
    scores = dict[str, dict[int, float]]()
    for names, deficit, spread in zip(trial.recipes.values(), case.deficits, case.spread, strict=True):
        ends = END - deficit + generator.normal(0, spread, len(names))
        ends = np.where(generator.random(len(names)) < case.collapse, 0.05, ends)
        level = np.clip(START + np.outer(ends - START, share), 0.01, 0.99)  # [runs, steps]
        solved = 1 / (
            1 + np.exp(-(np.log(level / (1 - level))[:, :, None] * 1.4 + hardness))
        )  # 1.4: difficulties pull means to 0.5
        own = (generator.random(solved.shape) < solved).mean(axis=2)
        scores |= {
            name: dict(zip(trial.evaluated, map(float, row), strict=True)) for name, row in zip(names, own, strict=True)
        }
    return scores


def play(case: Case, scores: dict[str, dict[int, float]]) -> Found:
    """Return what a trial finds whose runs have these scores; runs start in the order of `hpcrl trial`, seed after seed."""
    trial = case.trial
    waiting = [own[seed] for seed in range(case.seeds) for own in trial.recipes.values()]
    recipe_of = {run: recipe for recipe, own in trial.recipes.items() for run in own}
    done, looks = {run: set[int]() for run in waiting}, list[Look]()
    stopped, running, over = dict[str, Look](), list[str](), set[str]()
    while waiting or running:
        while waiting and (not case.at_once or len(running) < case.at_once):
            running.append(waiting.pop(0))
        for run in running:
            done[run].add(INTERVAL * (len(done[run]) + 1))
        running = [run for run in running if STEPS not in done[run]]
        if due := due_look(trial, looks, done, over.__contains__):
            looks.append(
                look_of(
                    case,
                    looks,
                    *due,
                    {run: own for run, own in scores.items() if due[0] in done[run] and recipe_of[run] not in stopped},
                )
            )
            stopped = stopped_recipes(looks)
            over = {run for run in done if recipe_of[run] in stopped}
            waiting, running = ([run for run in own if run not in over] for own in (waiting, running))
    pairs = {
        (one.leader, one.other)
        for look in looks
        for one in verdicts(trial, look)
        if one.kind == "worse" and (look.last or one.other in look.stopped)
    }
    return Found(frozenset(pairs), len(stopped), sum(map(len, done.values())) * INTERVAL / (STEPS * len(done)))


def look_of(case: Case, looks: Sequence[Look], step: int, share: float, scores: dict[str, dict[int, float]]) -> Look:
    """Return a look at the runs that have evaluated `step`."""
    trial, stopped = case.trial, stopped_recipes(looks)
    halfway = min((other for other in trial.evaluated if other < step), key=lambda at: abs(at - step / 2), default=0)
    at = {
        recipe: own
        for recipe, own in scores_by_recipe(trial, {run: of[step] for run, of in scores.items()}).items()
        if recipe not in stopped
    }
    earlier = {
        recipe: float(np.mean([scores[run][halfway] for run in own])) for recipe, own in at.items() if halfway and own
    }
    look = Look(
        len(looks) + 1,
        0.0,
        step,
        share,
        looks[-1].share if looks else 0.0,
        at,
        earlier,
        halfway,
        1 / case.prompts,
        case.prompts,
        [],
    )
    return replace(look, stopped=beaten(trial, look))


def rates(case: Case, times: int, seed: int = 0) -> dict[str, float]:
    """Return shares of trials: with a false verdict, with the true one of the first and the last recipe, and that stopped one; and of steps."""
    found = [play(case, drawn_scores(case, np.random.default_rng([seed, at]))) for at in range(times)]
    true = {
        (f"r{a}", f"r{b}")
        for a, mine in enumerate(case.deficits)
        for b, other in enumerate(case.deficits)
        if mine < other
    }
    return {
        "false": sum(bool(one.pairs - true) for one in found) / times,
        "found": sum(any(other == f"r{len(case.deficits) - 1}" for _, other in one.pairs & true) for one in found)
        / times,
        "stopped": sum(one.stopped > 0 for one in found) / times,
        "steps": sum(one.steps for one in found) / times,
    }


ALIKE = {
    "same recipe twice": Case((0.0, 0.0), 5),
    "same recipe twice, 3 seeds": Case((0.0, 0.0), 3),
    "same recipe twice, 10 seeds": Case((0.0, 0.0), 10),
    "same recipe twice, two nodes": Case((0.0, 0.0), 5, at_once=2),
    "one spread four times the other": Case((0.0, 0.0), 5, spread=(0.01, 0.04)),
    "a run in five collapses": Case((0.0, 0.0), 5, collapse=0.2),
    "8 prompts": Case((0.0, 0.0), 3, prompts=8),
    "four recipes alike": Case((0.0,) * 4, 5, spread=(0.02,) * 4),
}
"""Kinds of trials in which any verdict is false."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--times", type=int, default=4000, help="trials of each kind that are alike; a quarter of others"
    )
    times = parser.parse_args().times
    print("| all alike | false verdicts |\n|---|---|")
    for name, case in ALIKE.items():
        print(f"| {name} | {rates(case, times)['false']:.1%} |", flush=True)
    for spread in (0.01, 0.02, 0.04):
        print(
            f"\n| spread {spread:g}, seeds | " + " | ".join(f"{gap:g} worse" for gap in (0.02, 0.05, 0.1, 0.3)) + " |"
        )
        print("|" + "---|" * 5)
        for seeds in (3, 4, 5, 7, 10):
            cells = []
            for gap in (0.02, 0.05, 0.1, 0.3):
                found = rates(Case((0.0, gap), seeds, spread=(spread, spread)), times // 4)
                cells.append(f"{found['found']:.0%}, {found['steps']:.0%} of the steps")
            print(f"| {seeds} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
