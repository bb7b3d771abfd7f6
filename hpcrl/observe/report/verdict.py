"""Judges whether a run has learned, and is healthy: a sentence for each finding.

Rules of thumb, each with its numbers in the sentence: a warning is a reason to look at a curve, not a proof.
The table of docs/watching.md has a row for each of `RULES`, with metrics and thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from hpcrl.observe.summary import (
    ADVANTAGE,
    DIVERGENCE,
    EVAL_LOSS,
    EVAL_SCORE,
    GRADIENT,
    NO_ADVANTAGE,
    REWARD,
    TOKENS_PER_PASS,
    WITHOUT_SPREAD,
)
from hpcrl.rundir.ledger import Outcome

Status = Literal["good", "look", "bad"]

ENTROPY, KL, CLIP = "policy/policy_entropy", "policy/policy_kl", "policy/loss_metrics/clip_ratio"
MISMATCH, STALENESS = "policy/rollout_train_logprobs_abs_diff_mean", "async/staleness_max"
LENGTH, STOPPED = "generate/avg_num_tokens", "generate/stop_ratio"
SKIPPED, PASSED = "policy/skipped_updates", "reward/avg_pass_at_"
FAILED, SAMPLES = "generate/failed_samples", "generate/samples"
_FEW = 4  # steps that say nothing of a trend


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at."""

    name: str
    status: Status
    text: str


class Reported:
    """What a run has reported: the values of its metrics by step, and its settings.

    Attributes:
        config: settings of the run by dotted path.
    """

    def __init__(self, metrics: dict[str, Any], config: dict[str, Any]) -> None:
        self._metrics, self.config = metrics, config

    def __call__(self, name: str) -> list[float]:
        """Return the values of a metric, of the steps that have one."""
        return [value for value in self._metrics.get(name, ()) if value is not None]

    def ends(self, name: str) -> tuple[float, float]:
        """Return the means of a metric over the first and over the last tenth of its values."""
        values = self(name)
        count = max(1, len(values) // 10)
        return fmean(values[:count]), fmean(values[-count:])

    @property
    def learns_from_teacher(self) -> bool:
        return bool(self(DIVERGENCE))


Judge = Callable[[Reported], tuple[Status, str] | None]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        metrics: that it reads; it says nothing of a run that has not reported the first.
        look, bad: when, as in the table of docs/watching.md.
        judge: returns the verdict; None: too little is known.
    """

    name: str
    metrics: tuple[str, ...]
    look: str
    bad: str
    judge: Judge


RULES: list[Rule] = []


def _rule(name: str, *metrics: str, look: str = "", bad: str = "") -> Callable[[Judge], Judge]:
    def add(judge: Judge) -> Judge:
        RULES.append(Rule(name, metrics, look, bad, judge))
        return judge

    return add


def findings(curves: dict[str, Any], config: dict[str, Any], outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Return the findings about a run, from the metrics that it has reported.

    Args:
        curves: as of `curves_of`.
        config: settings of the run by dotted path.
    """
    reported = Reported(curves["metrics"], config)
    judged = ((rule.name, rule.judge(reported)) for rule in RULES if reported(rule.metrics[0]))
    found = [Verdict(name, *verdict) for name, verdict in judged if verdict]
    return [*found, *_numbers(curves), *_attempts(outcomes)]


def _numbers(curves: dict[str, Any]) -> Iterator[Verdict]:
    if not curves["finite"]:
        yield Verdict("numbers", "bad", "a metric was not a number, or infinite")


def _attempts(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    ended = [outcome for outcome in outcomes if outcome.kind in ("failed", "hang", "lost")]
    interrupted = sum(outcome.kind == "interrupted" for outcome in outcomes)
    if ended:
        last = f"the last: {ended[-1].kind}, {ended[-1].message}"
        yield Verdict("attempts", "look", f"{len(ended)} of {len(outcomes)} failed; {last}")
    elif outcomes:
        yield Verdict("attempts", "good", f"none failed, {interrupted} interrupted and continued")


@_rule(
    "learning", WITHOUT_SPREAD, ADVANTAGE,
    look="more than 80 % of the groups of the last tenth have one reward for all their samples",
    bad="all groups of all steps do, and no advantage differs from 0; runs with a teacher are left out",
)  # fmt: skip
def _spread(reported: Reported) -> tuple[Status, str] | None:
    if reported.learns_from_teacher:
        return None
    last = reported.ends(WITHOUT_SPREAD)[1]
    if min(reported(WITHOUT_SPREAD)) == 1 and max(reported(ADVANTAGE), default=0.0) < NO_ADVANTAGE:
        return "bad", "nothing: all samples of each group have the same reward in every step; hpcrl samples shows them"
    found = f"{last:.0%} of the groups have one reward for all their samples in the last tenth"
    return "look" if last > 0.8 else "good", found


def _trend(rewards: Sequence[float]) -> tuple[float, float, float]:
    """Return the means of the first and of the last tenth, and the standard error of their difference."""
    count = max(2, len(rewards) // 10)
    error = math.hypot(stdev(rewards[:count]), stdev(rewards[-count:])) / math.sqrt(count)
    return fmean(rewards[:count]), fmean(rewards[-count:]), error


@_rule(
    "reward", REWARD, WITHOUT_SPREAD,
    look="no trend: the means of the first and of the last tenth differ by no more than two standard errors",
    bad="it falls by more; or it is the same in every step, runs with a teacher left out",
)  # fmt: skip
def _reward(reported: Reported) -> tuple[Status, str] | None:
    rewards = reported(REWARD)
    known = len(rewards) >= _FEW or min(reported(WITHOUT_SPREAD), default=0.0) == 1
    if known and max(rewards) == min(rewards) and not reported.learns_from_teacher:
        return "bad", f"{rewards[0]:.3f} in every step"
    if len(rewards) < _FEW:
        return None
    first, last, error = _trend(rewards)
    rises, falls = last - first > 2 * error, first - last > 2 * error
    text = "it rises" if rises else "it falls" if falls else "no trend beyond its noise"
    status: Status = "good" if rises else "bad" if falls else "look"
    return status, f"{first:.3f} in the first tenth, {last:.3f} in the last: {text}"


def _evaluated(reported: Reported, metric: str, sign: int) -> tuple[Status, str] | None:
    scores = reported(metric)
    if len(scores) < 2:
        return None
    best = (max if sign > 0 else min)(scores)
    better = sign * (scores[-1] - scores[0]) > 0
    return "good" if better else "look", f"{scores[0]:.3f} before, {scores[-1]:.3f} at the end, {best:.3f} at best"


@_rule("evaluation", EVAL_SCORE, look="the last evaluation is not better than the first")
def _score(reported: Reported) -> tuple[Status, str] | None:
    return _evaluated(reported, EVAL_SCORE, 1)


@_rule("validation loss", EVAL_LOSS, look="the last evaluation is not better than the first")
def _loss(reported: Reported) -> tuple[Status, str] | None:
    return _evaluated(reported, EVAL_LOSS, -1)


@_rule(
    "overfitting", EVAL_SCORE, REWARD,
    bad="the reward rises by more than two standard errors, and the last evaluation is below the first",
)  # fmt: skip
def _overfitting(reported: Reported) -> tuple[Status, str] | None:
    scores, rewards = reported(EVAL_SCORE), reported(REWARD)
    if len(scores) < 2 or len(rewards) < _FEW:
        return None
    first, last, error = _trend(rewards)
    if last - first <= 2 * error or scores[-1] >= scores[0]:
        return None
    return (
        "bad",
        f"the reward rises, {first:.3f} → {last:.3f}, while evaluation falls, {scores[0]:.3f} → {scores[-1]:.3f}",
    )


@_rule(
    "entropy", ENTROPY, WITHOUT_SPREAD, f"{PASSED}N",
    look="below 5 % of the first tenth, or above 3 times it",
    bad="collapsed: below 0.01 nats in the last tenth, where more than 90 % of the groups have one reward and less than 90 % are solved",
)  # fmt: skip
def _entropy(reported: Reported) -> tuple[Status, str] | None:
    first, last = reported.ends(ENTROPY)
    text = f"{first:.3g} → {last:.3g} nats per token"
    alike = bool(reported(WITHOUT_SPREAD)) and reported.ends(WITHOUT_SPREAD)[1] > 0.9
    passed = f"{PASSED}{reported.config.get('generator.n_samples_per_prompt')}"
    if last < 0.01 and alike and reported(passed) and reported.ends(passed)[1] < 0.9:
        return "bad", f"{text}, all answers to a prompt are alike, and most are no solution: the policy has collapsed"
    if len(reported(ENTROPY)) < _FEW:
        return None
    low, high = last < 0.05 * first, last > 3 * first
    trend = ", hardly any exploration is left" if low else ", the policy becomes random" if high else ""
    return "look" if low or high else "good", text + trend


@_rule("KL", KL, look="above 1 nat per token in the last tenth")
def _kl(reported: Reported) -> tuple[Status, str]:
    last = reported.ends(KL)[1]
    return "look" if last > 1 else "good", f"{last:.3g} per token from the reference in the last tenth"


@_rule("clip", CLIP, look="above 20 % of the tokens in the last tenth")
def _clip(reported: Reported) -> tuple[Status, str]:
    last = reported.ends(CLIP)[1]
    return "look" if last > 0.2 else "good", f"{last:.1%} of the tokens are clipped in the last tenth"


@_rule(
    "mismatch", MISMATCH, look="above 0.1 nats per token in the last tenth, or above 0.02 and 3 times the first tenth"
)
def _mismatch(reported: Reported) -> tuple[Status, str]:
    first, last = reported.ends(MISMATCH)
    grows = last > 0.02 and last > 3 * first
    text = f"engines and trainer differ by {last:.2g} nats per token in the last tenth"
    text += f", and by {first:.2g} in the first: it grows" if grows else ""
    return "look" if last > 0.1 or grows else "good", text


@_rule(
    "gradient", GRADIENT, SKIPPED,
    look="0 in more than half of the steps, above 100 times the median, or an optimizer step was skipped",
    bad="0 in every step",
)  # fmt: skip
def _gradient(reported: Reported) -> tuple[Status, str]:
    gradient, skipped = sorted(reported(GRADIENT)), sum(reported(SKIPPED))
    middle, most, zeros = gradient[len(gradient) // 2], gradient[-1], gradient.count(0)
    if most == 0:
        return "bad", "norm 0 in every step: no weight has learned anything"
    text = f"norm {middle:.3g} in the middle, {most:.3g} at most"
    text += f"; 0 in {zeros} of {len(gradient)} steps" if zeros else ""
    text += f"; {skipped:.0f} optimizer steps were skipped" if skipped else ""
    return "look" if skipped or zeros > len(gradient) / 2 or most > 100 * max(middle, 1e-12) else "good", text


@_rule(
    "length", LENGTH,
    look="above 3 times the first tenth, or below a third of it",
    bad="above 90 % of generator.sampling_params.max_generate_length in the last tenth, of samples of one turn",
)  # fmt: skip
def _length(reported: Reported) -> tuple[Status, str]:
    first, last = reported.ends(LENGTH)
    text, limit = f"{first:.1f} → {last:.1f} tokens per response", reported.config.get(_LIMIT, math.inf)
    if last > 0.9 * limit and reported.config.get("generator.max_turns", 1) == 1:
        return "bad", f"{text}: at the limit, {_LIMIT} = {limit}; raise it, or add the reward overlong"
    return "look" if last > 3 * first or last < first / 3 else "good", text


_LIMIT = "generator.sampling_params.max_generate_length"


@_rule(
    "truncation", STOPPED,
    look="more than 10 % of the responses of the last tenth do not end by themselves",
    bad="more than 50 % do not",
)  # fmt: skip
def _truncation(reported: Reported) -> tuple[Status, str]:
    cut = 1 - reported.ends(STOPPED)[1]
    status: Status = "bad" if cut > 0.5 else "look" if cut > 0.1 else "good"
    return status, f"{cut:.1%} of the responses do not end by themselves in the last tenth"


@_rule("environments", SAMPLES, FAILED, look="more than 1 % of all samples have failed")
def _environments(reported: Reported) -> tuple[Status, str]:
    samples, failed = sum(reported(SAMPLES)), sum(reported(FAILED))
    text = f"{failed:.0f} of {samples:.0f} samples failed in their environment"
    return "look" if failed > 0.01 * samples else "good", text


@_rule("staleness", STALENESS, bad="above trainer.fully_async.max_staleness_steps in a step")
def _staleness(reported: Reported) -> tuple[Status, str]:
    bound, most = reported.config.get(_STALENESS, 0), max(reported(STALENESS))
    return "bad" if most > bound else "good", f"{most:.0f} steps at most, {bound} allowed"


_STALENESS = "trainer.fully_async.max_staleness_steps"


@_rule("drafts", TOKENS_PER_PASS, look="a pass generates less than 1.2 tokens in the last tenth")
def _drafts(reported: Reported) -> tuple[Status, str]:
    tokens, path = reported.ends(TOKENS_PER_PASS)[1], "generator.inference_engine.speculative.method"
    text = f"a pass over drafts generates {tokens:.2f} tokens in the last tenth"
    return (
        ("look", f"{text}: they hardly pay; leave out {path}, or lower num_speculative_tokens")
        if tokens < 1.2
        else ("good", text)
    )
