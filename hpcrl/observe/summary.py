"""What a run has achieved, from its metrics and its ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from hpcrl.observe.metrics import Record, read_metrics
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, Outcome, read_attempts, read_outcome
from hpcrl.units import duration

REWARD = "reward/avg_raw_reward"
EVAL_SCORE = "eval/all/avg_score"
STEP_SECONDS = "timing/step"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
SAMPLES = "generate/samples"
PAUSE = "weights/pause_seconds"
"""Of each replica: how long it stood still for a new version."""


@dataclass(frozen=True)
class Summary:
    """One run in a dozen numbers; None is what it has not reported.

    Attributes:
        steps: last step trained.
        samples: samples trained.
        eval_first, eval_last: step and score of the first and the last evaluation.
        reward_first, reward_last: step and mean reward of the first and the last training batch.
        tokens_per_second: mean over steps, weighted with their time.
        seconds_per_step: mean over steps.
        pause_mean, pause_max: seconds that a replica stood still for a weight update.
        seconds: time in all attempts, from the start of each to the last that is known of it.
        outcome: how the newest attempt ended, or None while it runs.
    """

    attempts: int
    steps: int
    samples: int | None
    eval_first: tuple[int, float] | None
    eval_last: tuple[int, float] | None
    reward_first: tuple[int, float] | None
    reward_last: tuple[int, float] | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    pause_mean: float | None
    pause_max: float | None
    seconds: float
    outcome: Outcome | None


def summarise(run: Run) -> Summary:
    """Return the summary of a run that ends, or has ended, or has only begun."""
    records = read_metrics(run)
    attempts = read_attempts(run)
    outcome = read_outcome(run)
    if outcome and attempts and outcome.attempt != attempts[-1].number:
        outcome = None
    scores, rewards, times = (_curve(records, name) for name in (EVAL_SCORE, REWARD, STEP_SECONDS))
    samples, throughput = _curve(records, SAMPLES), _curve(records, TOKENS_PER_SECOND)
    pauses = [value for record in records for name, value in record.metrics.items() if name.startswith(PAUSE)]
    seconds = {step: times.get(step, 1.0) for step in throughput}
    tokens = sum(throughput[step] * seconds[step] for step in throughput)
    return Summary(
        attempts=len(attempts),
        steps=max(times, default=0),
        samples=round(sum(samples.values())) if samples else None,
        eval_first=_end(scores, min),
        eval_last=_end(scores, max),
        reward_first=_end(rewards, min),
        reward_last=_end(rewards, max),
        tokens_per_second=tokens / sum(seconds.values()) if sum(seconds.values()) > 0 else None,
        seconds_per_step=_mean(times.values()),
        pause_mean=_mean(pauses),
        pause_max=max(pauses, default=None),
        seconds=sum(_seconds(attempt, records, outcome) for attempt in attempts),
        outcome=outcome,
    )


def headline(summary: Summary) -> str:
    """Return steps, reward, evaluation and duration in one line; empty for a run that has trained nothing."""
    if not summary.steps:
        return ""
    parts = [f"{summary.steps} step{'s' * (summary.steps > 1)}"]
    for name, first, last in (
        ("reward", summary.reward_first, summary.reward_last),
        ("eval", summary.eval_first, summary.eval_last),
    ):
        if first and last:
            parts.append(f"{name} {last[1]:.3f}" if first == last else f"{name} {first[1]:.3f} → {last[1]:.3f}")
    return " · ".join([*parts, duration(summary.seconds)])


def _curve(records: Iterable[Record], name: str) -> dict[int, float]:
    return {record.step: record.metrics[name] for record in records if name in record.metrics}


def _end(curve: dict[int, float], which: Callable[[Iterable[int]], int]) -> tuple[int, float] | None:
    if not curve:
        return None
    step = which(curve)
    return step, curve[step]


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None


def _seconds(attempt: Attempt, records: Iterable[Record], outcome: Outcome | None) -> float:
    if outcome and outcome.attempt == attempt.number:
        return max(0.0, outcome.ended - attempt.started)
    last = max((record.time for record in records if record.attempt == attempt.number), default=attempt.started)
    return max(0.0, last - attempt.started)
