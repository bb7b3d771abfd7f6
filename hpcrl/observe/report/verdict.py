"""Judges whether a run has learned, and is healthy: a sentence for each finding.

Rules of thumb, each with its numbers in the sentence: a warning is a reason to look at a curve, not a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from hpcrl.observe.summary import EVAL_LOSS, EVAL_SCORE, REWARD
from hpcrl.rundir.ledger import Outcome

Status = Literal["good", "look", "bad"]

ENTROPY, KL, CLIP = "policy/policy_entropy", "policy/policy_kl", "policy/loss_metrics/clip_ratio"
MISMATCH, STALENESS = "policy/rollout_train_logprobs_abs_diff_mean", "async/staleness_max"
LENGTH, STOPPED = "generate/avg_num_tokens", "generate/stop_ratio"
GRADIENT, SKIPPED = "policy/grad_norm", "policy/skipped_updates"
FAILED, SAMPLES = "generate/failed_samples", "generate/samples"
_FEW = 4  # steps that say nothing of a trend


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at."""

    name: str
    status: Status
    text: str


def findings(curves: dict[str, Any], config: dict[str, Any], outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Return the findings about a run, from the metrics that it has reported.

    Args:
        curves: as of `curves_of`.
        config: settings of the run by dotted path.
    """

    def values(name: str) -> list[float]:
        return [value for value in curves["metrics"].get(name, ()) if value is not None]

    found = [*_learning(values), *_policy(values), *_samples(values), *_staleness(values, config)]
    if not curves["finite"]:
        found.append(Verdict("numbers", "bad", "a metric was not a number, or infinite"))
    ended = [outcome for outcome in outcomes if outcome.kind in ("failed", "hang", "lost")]
    interrupted = sum(outcome.kind == "interrupted" for outcome in outcomes)
    if ended:
        last = ended[-1]
        found.append(
            Verdict(
                "attempts", "look", f"{len(ended)} of {len(outcomes)} failed; the last: {last.kind}, {last.message}"
            )
        )
    elif outcomes:
        found.append(Verdict("attempts", "good", f"none failed, {interrupted} interrupted and continued"))
    return found


def _ends(values: Sequence[float]) -> tuple[float, float]:
    count = max(1, len(values) // 10)
    return fmean(values[:count]), fmean(values[-count:])


def _learning(values: Callable[[str], list[float]]) -> Iterator[Verdict]:
    for name, metric, sign in (("evaluation", EVAL_SCORE, 1), ("validation loss", EVAL_LOSS, -1)):
        scores = values(metric)
        if len(scores) > 1:
            better = sign * (scores[-1] - scores[0])
            best = (max if sign > 0 else min)(scores)
            yield Verdict(
                name,
                "good" if better > 0 else "look",
                f"{scores[0]:.3f} before, {scores[-1]:.3f} at the end, {best:.3f} at best",
            )
    if len(rewards := values(REWARD)) >= _FEW:
        count = max(2, len(rewards) // 10)
        first, last = fmean(rewards[:count]), fmean(rewards[-count:])
        error = math.hypot(stdev(rewards[:count]), stdev(rewards[-count:])) / math.sqrt(count)
        if last - first > 2 * error:
            status, text = "good", "it rises"
        elif first - last > 2 * error:
            status, text = "bad", "it falls"
        else:
            status, text = "look", "no trend beyond its noise"
        yield Verdict("reward", status, f"{first:.3f} in the first tenth, {last:.3f} in the last: {text}")


def _policy(values: Callable[[str], list[float]]) -> Iterator[Verdict]:
    if len(entropy := values(ENTROPY)) >= _FEW:
        first, last = _ends(entropy)
        low, high = last < 0.05 * first, last > 3 * first
        text = ", hardly any exploration is left" if low else ", the policy becomes random" if high else ""
        yield Verdict("entropy", "look" if low or high else "good", f"{first:.3g} → {last:.3g} nats per token{text}")
    if kl := values(KL):
        last = _ends(kl)[1]
        yield Verdict(
            "KL", "look" if last > 1 else "good", f"{last:.3g} per token from the reference in the last tenth"
        )
    if clip := values(CLIP):
        last = _ends(clip)[1]
        yield Verdict(
            "clip", "look" if last > 0.2 else "good", f"{last:.1%} of the tokens are clipped in the last tenth"
        )
    if mismatch := values(MISMATCH):
        last = _ends(mismatch)[1]
        text = f"engines and trainer differ by {last:.2g} nats per token in the last tenth"
        yield Verdict("mismatch", "look" if last > 0.1 else "good", text)
    if gradient := values(GRADIENT):
        middle = sorted(gradient)[len(gradient) // 2]
        skipped = sum(values(SKIPPED))
        text = f"norm {middle:.3g} in the middle, {max(gradient):.3g} at most"
        if skipped:
            text += f"; {skipped:.0f} optimizer steps were skipped"
        yield Verdict("gradient", "look" if skipped or max(gradient) > 100 * max(middle, 1e-12) else "good", text)


def _samples(values: Callable[[str], list[float]]) -> Iterator[Verdict]:
    if lengths := values(LENGTH):
        first, last = _ends(lengths)
        changed = last > 3 * first or last < first / 3
        yield Verdict("length", "look" if changed else "good", f"{first:.1f} → {last:.1f} tokens per response")
    if stopped := values(STOPPED):
        cut = 1 - _ends(stopped)[1]
        status: Status = "bad" if cut > 0.5 else "look" if cut > 0.1 else "good"
        yield Verdict("truncation", status, f"{cut:.1%} of the responses do not end by themselves in the last tenth")
    if samples := sum(values(SAMPLES)):
        failed = sum(values(FAILED))
        text = f"{failed:.0f} of {samples:.0f} samples failed in their environment"
        yield Verdict("environments", "look" if failed > 0.01 * samples else "good", text)


def _staleness(values: Callable[[str], list[float]], config: dict[str, Any]) -> Iterator[Verdict]:
    if stale := values(STALENESS):
        bound = config.get("trainer.fully_async.max_staleness_steps", 0)
        text = f"{max(stale):.0f} steps at most, {bound} allowed"
        yield Verdict("staleness", "bad" if max(stale) > bound else "good", text)
