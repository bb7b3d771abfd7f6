"""Aggregates scores of an evaluation by data source: means, their errors, and whether two evaluations of the same prompts differ."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, nan, sqrt
from statistics import fmean, stdev
from typing import Any, Protocol, TypeVar

from hpcrl.text import metric_name

MOST_SOURCES = 64
"""A dataset decides how many sources it names; each becomes six curves or more."""
Z95 = 1.96
"""Standard errors on either side of a mean that a 95 % confidence interval has."""
SUCCESS = "success"
"""A metric of an environment that says by itself whether a sample has solved its prompt: 1, or less."""
_DRAWS = 9999
_TIE = 1e-9
_ROUNDING = 1e-6


class Scored(Protocol):
    """A prompt whose samples are scored, but for those whose stop reason is "failed": they have no reward."""

    @property
    def data_source(self) -> str: ...
    @property
    def rewards(self) -> Sequence[float]: ...
    @property
    def env_metrics(self) -> Sequence[Mapping[str, float]]: ...
    @property
    def response_lengths(self) -> Sequence[int]: ...
    @property
    def stop_reasons(self) -> Sequence[str]: ...


S = TypeVar("S", bound=Scored)


def by_source(prompts: Sequence[S]) -> dict[str, list[S]]:
    """Return the prompts of all sources together, as "all", and of each source. Its name has underscores for slashes and for other characters
    that no metric's name has; all becomes all_. Beyond the most frequent `MOST_SOURCES`, they are "other" together."""
    names = [metric_name(prompt.data_source).replace("/", "_") for prompt in prompts]
    counts = Counter(names)
    most = set(sorted(counts, key=lambda name: (-counts[name], name))[:MOST_SOURCES])
    sources: dict[str, list[S]] = defaultdict(list)
    for prompt, name in zip(prompts, names, strict=True):
        sources["all"].append(prompt)
        sources["all_" if name == "all" else name if name in most else "other"].append(prompt)
    return dict(sources)


def own_rewards(prompt: Scored) -> list[float]:
    """Return the rewards of a prompt's samples, those that failed left out."""
    return [reward for reward, reason in zip(prompt.rewards, prompt.stop_reasons, strict=True) if reason != "failed"]


def is_solved(reward: float, metrics: Mapping[str, float], success_reward: float) -> bool:
    """Return whether a sample has solved its prompt: its environment's metric `success` is 1 or, without one, its reward reaches the threshold.

    Args:
        success_reward: generator.success_reward; rewards are float32 in files, and reach it within 1e-6.
    """
    value, least = (metrics[SUCCESS], 1.0) if SUCCESS in metrics else (reward, success_reward)
    return value >= least - _ROUNDING * max(1.0, abs(least))


def solved_by(prompts: Sequence[Scored], success_reward: float) -> str:
    """Return what decides whether a sample of these has solved its prompt, as it stands behind pass@k."""
    own = any(SUCCESS in metrics for prompt in prompts for metrics in prompt.env_metrics)
    return SUCCESS if own else f"reward ≥ {success_reward:g}"


def _solved(prompt: Scored, success_reward: float) -> list[bool]:
    """Return which samples have solved a prompt, those that failed left out."""
    samples = zip(prompt.rewards, prompt.env_metrics, prompt.stop_reasons, strict=True)
    return [is_solved(reward, metrics, success_reward) for reward, metrics, reason in samples if reason != "failed"]


def of_prompts(prompts: Sequence[Scored], success_reward: float) -> dict[str, list[float | None]]:
    """Return avg_score, the mean reward, and pass_at_k of each prompt; None where too many of its samples failed.

    With n samples per prompt, pass_at_n is 1 where any sample is solved; for each smaller power of two k, pass_at_k is `pass_at`.
    """
    n, scored = min(len(prompt.rewards) for prompt in prompts), [own_rewards(prompt) for prompt in prompts]
    found: dict[str, list[float | None]] = {"avg_score": [fmean(rewards) if rewards else None for rewards in scored]}
    solved = [_solved(prompt, success_reward) for prompt in prompts]
    for k in (*_powers_of_two_below(n), n):
        found[f"pass_at_{k}"] = [pass_at(k, own) if len(own) >= k else None for own in solved]
    return found


def scores(prompts: Sequence[Scored], success_reward: float) -> dict[str, float]:
    """Return the evaluation metrics of each data source and of all together; all prompts have equally many samples.

    Means are over what has a value; one that no prompt has is left out.
    """
    metrics = {}
    for source, members in by_source(prompts).items():
        rewards = [reward for prompt in members for reward in own_rewards(prompt)]
        lengths = [length for prompt in members for length in prompt.response_lengths]
        metrics |= {
            f"eval/{source}/{name}": fmean(values) for name, values in _known(members, success_reward).items() if values
        }
        if rewards:
            metrics[f"eval/{source}/mean_positive_reward"] = fmean(max(reward, 0.0) for reward in rewards)
        metrics[f"eval/{source}/generate/avg_num_tokens"] = fmean(lengths)
        metrics[f"eval/{source}/generate/failed_samples"] = float(len(lengths) - len(rewards))
    return metrics


def results_of(prompts: Sequence[Scored], success_reward: float) -> dict[str, Any]:
    """Return the content of an evaluation's results.json: by source the number of prompts, metrics, standard errors, and stop reasons."""
    return {
        "solved": solved_by(prompts, success_reward),
        "prompts": {source: len(members) for source, members in by_source(prompts).items()},
        "metrics": scores(prompts, success_reward),
        "errors": standard_errors(prompts, success_reward),
        "stop_reasons": {
            source: dict(sorted(Counter(reason for prompt in members for reason in prompt.stop_reasons).items()))
            for source, members in by_source(prompts).items()
        },
    }


def standard_errors(prompts: Sequence[Scored], success_reward: float) -> dict[str, float]:
    """Return the standard error of each avg_score and pass_at_k of `scores`, over the prompts, of which the samples of one are no independent
    draws (E. Miller, arXiv:2411.00640, section 2); those of a single prompt have none and are left out."""
    return {
        f"eval/{source}/{name}": standard_error(values)
        for source, members in by_source(prompts).items()
        for name, values in _known(members, success_reward).items()
        if len(values) > 1
    }


def _known(prompts: Sequence[Scored], success_reward: float) -> dict[str, list[float]]:
    found = of_prompts(prompts, success_reward)
    return {name: [one for one in values if one is not None] for name, values in found.items()}


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; NaN of a single one."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else nan


def pass_at(k: int, solved: Sequence[bool]) -> float:
    """Return the probability that k of these samples of a prompt, drawn without replacement, include one that is solved.

    With c of n samples solved this is 1 - C(n - c, k) / C(n, k), an unbiased estimate of that probability for the policy
    (M. Chen and others 2021, arXiv:2107.03374); for k = n it is 1 where any was, else 0.

    Args:
        k: from 1 to len(solved).
    """
    n = len(solved)
    return 1.0 - comb(n - sum(solved), k) / comb(n, k)


def _powers_of_two_below(n: int) -> list[int]:
    return [1 << power for power in range((n - 1).bit_length())]


@dataclass(frozen=True)
class ScoreDifference:
    """Of the means of two evaluations of the same prompts.

    Attributes:
        mean: of the second less the first.
        error: standard error of `mean`, of the differences of prompts; NaN with a single prompt.
        p: probability of a difference at least as large where neither is better, by random signs of the prompts' differences.
        better, same, worse: prompts.
    """

    mean: float
    error: float
    p: float
    better: int
    same: int
    worse: int

    @property
    def prompts(self) -> int:
        """Prompts that both evaluations have a value of."""
        return self.better + self.same + self.worse

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of `mean`."""
        return self.mean - Z95 * self.error, self.mean + Z95 * self.error


def compare(before: Sequence[float], after: Sequence[float]) -> ScoreDifference:
    """Compare two evaluations by what each prompt has in both, in the same order (paired, arXiv:2411.00640, section 4.2)."""
    differences = [second - first for first, second in zip(before, after, strict=True)]
    better, worse = (sum(sign * value > _TIE for value in differences) for sign in (1, -1))
    return ScoreDifference(
        mean=fmean(differences),
        error=standard_error(differences),
        p=_sign_flip_test(differences),
        better=better,
        same=len(differences) - better - worse,
        worse=worse,
    )


def _sign_flip_test(differences: Sequence[float]) -> float:
    """Return the p-value of the paired permutation test (two-sided; 9,999 draws from a fixed seed, so that 0.0001 is the least)."""
    generator = random.Random(0)
    counts = Counter(round(abs(value), 9) for value in differences if abs(value) > _TIE)
    observed = abs(sum(differences)) - _TIE * len(differences)

    def drawn() -> float:
        # of `count` prompts that differ by `size`, as many as there are 1 bits count for the second
        return sum(size * (2 * generator.getrandbits(count).bit_count() - count) for size, count in counts.items())

    return (1 + sum(abs(drawn()) >= observed for _ in range(_DRAWS))) / (1 + _DRAWS)
