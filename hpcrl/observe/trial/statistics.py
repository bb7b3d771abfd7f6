"""Compares recipes by the scores of their runs, at several looks: intervals whose errors are bounded over all looks and all pairs together.

The unit of replication is the run. All runs have the same prompts, whose difficulty cancels out of a difference; what is left is the spread
between runs of one recipe. A look tests each pair of recipes by the difference of their means (B. L. Welch, Biometrika 34, 1947).
Looks share the error by a spending function (K. K. G. Lan and D. L. DeMets, Biometrika 70, 1983), here alpha t^2 (K. Kim and D. L. DeMets,
Biometrika 74, 1987). Looks and pairs are added up (Bonferroni), which holds however they depend on one another: curves of the same runs at
two steps have no joint distribution that is known.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, variance

ALPHA = 0.05
"""Probability of any false verdict in a trial whose recipes are all alike."""
POWER = 0.8
"""Probability with which `seeds_needed` runs find an effect."""
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class RecipeDifference:
    """Of the mean scores of two recipes.

    Attributes:
        mean: of the second less the first.
        low, high: interval of `mean`, at the level of its look; infinite where a recipe has fewer than two runs.
        deviation: standard deviation between runs of one recipe, of both together; NaN where it is not known.
    """

    mean: float
    low: float
    high: float
    deviation: float


def difference(first: Sequence[float], second: Sequence[float], level: float, resolution: float) -> RecipeDifference:
    """Return the difference of two recipes with its interval of Welch's test; its degrees of freedom are rounded down.

    Args:
        first, second: scores of their runs.
        level: probability that the interval does not hold the true difference.
        resolution: least standard deviation that scores of runs can have: what one sample changes.
    """
    mean = fmean(second) - fmean(first)
    if min(len(first), len(second)) < 2:
        return RecipeDifference(mean, -math.inf, math.inf, math.nan)
    least = max(resolution**2, 1e-24)
    spreads = [max(variance(scores), least) for scores in (first, second)]
    parts = [spread / len(scores) for spread, scores in zip(spreads, (first, second), strict=True)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(scores) - 1) for part, scores in zip(parts, (first, second), strict=True)
    )
    half = t_quantile(level, math.floor(freedom + 1e-9)) * math.sqrt(sum(parts))
    return RecipeDifference(mean, mean - half, mean + half, math.sqrt(fmean(spreads)))


def spent(share: float) -> float:
    """Return how much of `ALPHA` looks may have spent when this share of all training of a trial is done."""
    return ALPHA * min(max(share, 0.0), 1.0) ** 2


def level_of_look(share: float, before: float, recipes: int) -> float:
    """Return the level of each pair's interval at a look.

    Args:
        share: of all training of the trial, done at this look; 1: the last look.
        before: the same at the look before it; 0: this is the first.
        recipes: of the whole trial, those that were stopped too.
    """
    return (spent(share) - spent(before)) / math.comb(recipes, 2)


@cache
def t_quantile(level: float, freedom: int) -> float:
    """Return the t that Student's |T| exceeds with the probability `level`, found by bisection.

    Args:
        freedom: degrees of freedom, from 1.
    """
    low, high = 0.0, 1.0
    while _exceeds(high, freedom) > level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeds(middle, freedom) > level else (low, middle)
    return high


def _exceeds(t: float, freedom: int) -> float:
    """Return the probability that Student's |T| exceeds t (M. Abramowitz and I. A. Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = 0.0 if freedom == 1 else term
    for order in range(2 + freedom % 2, freedom - 1, 2):
        term *= (order - 1) / order * cosine**2
        total += term
    inside = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return 1.0 - inside


def seeds_needed(deviation: float, effect: float, level: float) -> int | None:
    """Return how many runs of each of two recipes find an effect with the probability `POWER`; None: more than a thousand.

    Args:
        deviation: standard deviation between runs of one recipe.
        level: of the interval at the last look.
    """
    seeds = range(2, _MOST_SEEDS + 1)
    at = bisect_left(seeds, -effect, key=lambda count: -_found(count, deviation, level))
    return seeds[at] if at < len(seeds) else None


def largest_deviation(seeds: int, effect: float, level: float) -> float:
    """Return the greatest standard deviation between runs at which so many seeds find an effect with the probability `POWER`."""
    return effect / _found(seeds, 1.0, level)


def _found(seeds: int, deviation: float, level: float) -> float:
    """Return the effect that a look finds with the probability `POWER`."""
    freedom = 2 * seeds - 2
    return (t_quantile(level, freedom) + t_quantile(2 * (1 - POWER), freedom)) * deviation * math.sqrt(2 / seeds)
