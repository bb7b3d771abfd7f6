"""Summarises a run from its metrics, its evaluations and its ledger."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hpcrl.observe.metrics import Record, first_record, last_records, read_metrics
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run, version_of
from hpcrl.rundir.ledger import Attempt, Outcome, attempts_as_set, read_attempts, read_outcomes
from hpcrl.rundir.starts import read_starts, resumed_after
from hpcrl.units import duration

REWARD = "reward/avg_raw_reward"
EVAL_SCORE = "eval/all/avg_score"
EVAL_LOSS = "eval/all/loss"
EVAL_FAILED = "eval/all/generate/failed_samples"
STEP_SECONDS = "timing/step"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
SAMPLES = "generate/samples"
WITHOUT_SPREAD, TRAINED_WITHOUT_SPREAD = "reward/groups_without_spread", "reward/trained_groups_without_spread"
"""Shares of groups whose samples all have the same reward: of those that were generated, and of those that filters leave to train."""
ADVANTAGE, GRADIENT, DIVERGENCE = "loss/avg_raw_advantages_abs", "policy/grad_norm", "distillation/divergence"
NO_ADVANTAGE = 1e-6
"""Mean absolute advantage below which rewards teach nothing: rounding alone may leave as much."""
TOKENS_PER_PASS = "generate/tokens_per_pass"
"""Of each replica with speculative decoding: tokens that a pass over a request's drafts generates."""
PAUSE = "weights/pause_seconds"
"""Of each replica: how long it stood still for a new version."""
_TOGETHER, _MOST_TOGETHER = 5, 40
_MOST_STEPS = 1000


@dataclass(frozen=True)
class Headline:
    """Summary of a run for a list of runs: read from the ends of its files, however long they are. None is what it has not reported.

    Attributes:
        steps: last step trained.
        eval_first, eval_last: step and score of the first and the last evaluation.
        loss_first, loss_last: step and loss of the first and the last evaluation of validation sets.
        reward_first, reward_last: step and mean reward of the first and the last training batch.
        seconds: time in all attempts, from the start of each to its end, or to the last that is known of it.
        outcome: how the newest attempt ended, or None while it runs.
        learning: why the last step taught the policy nothing, with the command that shows its samples; empty where it did.
    """

    attempts: int
    steps: int
    eval_first: tuple[int, float] | None
    eval_last: tuple[int, float] | None
    loss_first: tuple[int, float] | None
    loss_last: tuple[int, float] | None
    reward_first: tuple[int, float] | None
    reward_last: tuple[int, float] | None
    seconds: float
    outcome: Outcome | None
    learning: str

    def __str__(self) -> str:
        """Return steps, reward, evaluation and duration in one line; empty for a run that has trained nothing."""
        if not self.steps:
            return ""
        parts = [f"{self.steps} step{'s' * (self.steps > 1)}"]
        for name, first, last in (
            ("reward", self.reward_first, self.reward_last),
            ("eval", self.eval_first, self.eval_last),
            ("loss", self.loss_first, self.loss_last),
        ):
            if first and last:
                parts.append(f"{name} {last[1]:.3f}" if first == last else f"{name} {first[1]:.3f} → {last[1]:.3f}")
        if self.learning:
            parts.append("nothing learned in the last step")
        return " · ".join([*parts, duration(self.seconds)])


@dataclass(frozen=True)
class Summary(Headline):
    """One run in a dozen numbers; None is what it has not reported.

    Attributes:
        samples: samples trained.
        tokens_per_second: mean over steps, weighted with their time.
        seconds_per_step: mean over steps.
        pause_mean, pause_max: seconds that a replica stood still for a weight update.
    """

    samples: int | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    pause_mean: float | None
    pause_max: float | None


def headline(run: Run) -> Headline:
    """Return the headline of a run."""
    attempts, outcomes = read_attempts(run), {outcome.attempt: outcome for outcome in read_outcomes(run)}
    valid = _validity(run, attempts)
    trained, rewarded = (
        next(iter(last_records(run, *which, valid)), None)
        for which in (("trainer", STEP_SECONDS), ("controller", REWARD))
    )
    first = first_record(run, "controller", REWARD, valid) if rewarded else None
    versions = _evaluations(run)
    return Headline(
        attempts=len(attempts),
        steps=trained.step if trained else 0,
        eval_first=_first(run.eval_summary, EVAL_SCORE, versions),
        eval_last=_first(run.eval_summary, EVAL_SCORE, versions[::-1]),
        # only the newest can be unfinished: the others are not searched for what runs of other modes never have
        loss_first=_first(run.eval_losses, EVAL_LOSS, versions[:1]),
        loss_last=_first(run.eval_losses, EVAL_LOSS, versions[-2:][::-1]),
        reward_first=(first.step, first.metrics[REWARD]) if first else None,
        reward_last=(rewarded.step, rewarded.metrics[REWARD]) if rewarded else None,
        seconds=sum(_seconds(run, attempt, outcomes.get(attempt.number), trained) for attempt in attempts),
        outcome=outcomes.get(attempts[-1].number if attempts else 0),
        learning=nothing_learned(run.name, trained) if trained else "",
    )


def nothing_learned(name: str, trained: Record) -> str:
    """Return why a step of the trainer taught the policy nothing, with the command that shows its samples; empty where it did.

    Args:
        name: of the run.
    """
    metrics = trained.metrics
    if (
        metrics.get(TRAINED_WITHOUT_SPREAD) == 1
        and metrics.get(ADVANTAGE, 0.0) < NO_ADVANTAGE
        and DIVERGENCE not in metrics
    ):
        why = "all samples of each group have the same reward"
    elif metrics.get(GRADIENT) == 0:
        why = "the gradient is 0"
    else:
        return ""
    return f"nothing in step {trained.step}: {why}; hpcrl samples {name} shows them"


def summarise(run: Run) -> Summary:
    """Return the summary of a run that ends, or has ended, or has only begun; all its metrics are read."""
    records = read_metrics(run, STEP_SECONDS, SAMPLES, TOKENS_PER_SECOND, PAUSE)
    times, samples, throughput = (_curve(records, name) for name in (STEP_SECONDS, SAMPLES, TOKENS_PER_SECOND))
    pauses = [value for record in records for name, value in record.metrics.items() if name.startswith(PAUSE)]
    seconds = {step: times.get(step, 1.0) for step in throughput}
    tokens = sum(throughput[step] * seconds[step] for step in throughput)
    return Summary(
        **vars(headline(run)),
        samples=round(sum(samples.values())) if samples else None,
        tokens_per_second=tokens / sum(seconds.values()) if sum(seconds.values()) > 0 else None,
        seconds_per_step=_mean(times.values()),
        pause_mean=_mean(pauses),
        pause_max=max(pauses, default=None),
    )


def pace_of(run: Run) -> float | None:
    """Return the seconds per step of a running run, with evaluations, checkpoints and exports; None where they are not known yet.

    It is a median of means: each over as many consecutive steps as lie between two evaluations, among the newest steps. So evaluations,
    checkpoints and exports have their share, and a single slow step has none. The steps of all attempts count, but neither the
    start of an attempt nor the time in the queue.
    """
    versions = _evaluations(run)[-2:]
    together = min(_MOST_TOGETHER, versions[1] - versions[0]) if len(versions) == 2 else _TOGETHER
    valid = _validity(run, read_attempts(run))
    newest = last_records(run, "trainer", STEP_SECONDS, valid, 2 * max(together, _TOGETHER) + 1)
    return seconds_per_step([(record.attempt, record.step, record.time) for record in reversed(newest)], together)


@dataclass(frozen=True)
class Pace:
    """Seconds per step of the attempts with one layout.

    Attributes:
        sizes: of the layout, by the path of the setting; empty without ranges.
    """

    nodes: int
    sizes: dict[str, int]
    seconds: float


def pace_by_layout(run: Run) -> list[Pace]:
    """Return the seconds per step as `pace_of`, by the layout of the attempts that trained the newest steps; without layouts that have trained too few.

    Only attempts with the present settings count: another batch, model or length takes another time.
    """
    attempts, alike = read_attempts(run), attempts_as_set(run)
    layouts = {attempt.number: (len(attempt.hosts), *attempt.sizes.items()) for attempt in alike}
    steps = dict[tuple[Any, ...], list[tuple[int, int, float]]]()
    for record in reversed(last_records(run, "trainer", STEP_SECONDS, _validity(run, attempts), _MOST_STEPS)):
        if layout := layouts.get(record.attempt):
            steps.setdefault(layout, []).append((record.attempt, record.step, record.time))
    paces = {layout: seconds_per_step(own, _TOGETHER) for layout, own in steps.items() if len(own) > _TOGETHER}
    return [Pace(nodes, dict(sizes), pace) for (nodes, *sizes), pace in paces.items() if nodes and pace is not None]


def seconds_per_step(steps: Sequence[tuple[int, int, float]], together: int) -> float | None:
    """Return the median of the mean times of `together` steps in a row; of fewer where there are not so many, None where there are none.

    Args:
        steps: attempt, number and Unix time of the end of each step that counts, in their order.
    """
    times = [
        later[2] - earlier[2] for earlier, later in pairwise(steps) if earlier[0] == later[0] and earlier[1] < later[1]
    ]
    count = min(together, len(times))
    return median(fmean(times[first : first + count]) for first in range(len(times) - count + 1)) if times else None


def _validity(run: Run, attempts: Sequence[Attempt]) -> Callable[[Record], bool]:
    """Return a predicate for records: no later attempt has begun before their step."""
    resumed = resumed_after(read_starts(run)) if len(attempts) > 1 else {}
    return lambda record: all(record.step <= step for attempt, step in resumed.items() if attempt > record.attempt)


def _evaluations(run: Run) -> list[int]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(version for name in os.listdir(run.evals) if (version := version_of(Path(name))) is not None)
    return []


def _first(file: Callable[[int], Path], name: str, versions: Iterable[int]) -> tuple[int, float] | None:
    for version in versions:
        with suppress(ValueError):
            metrics: Any = read_json(file(version))
            value = metrics.get(name) if isinstance(metrics, dict) else None
            if isinstance(value, int | float):
                return version, value
    return None


def _curve(records: Iterable[Record], name: str) -> dict[int, float]:
    return {record.step: record.metrics[name] for record in records if name in record.metrics}


def _mean(numbers: Collection[float]) -> float | None:
    return math.fsum(numbers) / len(numbers) if numbers else None


def _seconds(run: Run, attempt: Attempt, outcome: Outcome | None, last: Record | None) -> float:
    if outcome is None:
        ended = last.time if last and last.attempt == attempt.number else attempt.started
    elif outcome.kind == "lost":  # the next process recorded that, perhaps days later
        ended = min(outcome.ended, _last_word(run.logs(attempt.number)))
    else:
        ended = outcome.ended
    return max(0.0, ended - attempt.started)


def _last_word(logs: Path) -> float:
    """Return when a log of this folder was last written to; 0 where there is none."""
    with suppress(FileNotFoundError), os.scandir(logs) as entries:
        return max((entry.stat().st_mtime for entry in entries), default=0.0)
    return 0.0
