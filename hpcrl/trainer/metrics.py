"""The trainer's metrics of a batch, under SkyRL's names."""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch

from hpcrl.algorithms.filters import share_without_spread
from hpcrl.algorithms.off_policy import PER_SAMPLE
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.observe.metrics import Histogram
from hpcrl.observe.summary import ADVANTAGE, DIVERGENCE, GRADIENT, TRAINED_WITHOUT_SPREAD
from hpcrl.observe.timeline import OTHER, Timeline
from hpcrl.runtime.memory import GIB, resident
from hpcrl.trainer.advantages import Advantages
from hpcrl.trainer.backends.base import UpdateResult
from hpcrl.trainer.batching import idle_share, trained_groups
from hpcrl.trainer.distributed import World
from hpcrl.trainer.loss import LOSS_METRICS, MISMATCH, MISMATCH_RANGE, TEACHER_DIVERGENCE
from hpcrl.trainer.models.flops import describe_flops
from hpcrl.trainer.offline.preferences import PER_PAIR
from hpcrl.trainer.offline.unpaired import answer_means
from hpcrl.trainer.packing import MiniBatch
from hpcrl.types import Batch

_EXTREMES = ("_max", "_min")
_STEP, _BATCH = "step", "wait_for_generation_buffer"


class PhaseTimer:
    """Adds up the seconds of each phase; a step ends with `lap`, what follows until `between` belongs to no step.

    Args:
        timeline: that notes them too; None: nobody looks at one.

    Attributes:
        phase: the one that the process is in; "" between phases.
        begun, expected: micro-batches of the last counted phase that were begun, and how many it has; 0: not known.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline
        self.phase, self.begun, self.expected = "", 0, 0
        if timeline:
            timeline.enter(OTHER)
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began, outer, self.phase = time.monotonic(), self.phase, phase
        try:
            with self._timeline.during(phase) if self._timeline else nullcontext():
                yield
        finally:
            self._seconds[phase] += time.monotonic() - began
            self.phase = outer

    def count(self, expected: int = 0) -> None:
        """Begin to count micro-batches, of which there are so many; 0: it is not known."""
        self.begun, self.expected = 0, expected

    def begin(self, step: int) -> None:
        """Record in the timeline that the process works on this step from now on."""
        if self._timeline:
            self._timeline.begin_step(step)

    def resume(self, seconds: Mapping[str, float]) -> None:
        """Go on with a step on which an earlier attempt spent what `lap` returned there."""
        for phase, value in seconds.items():
            if phase == _STEP:
                self._began -= value
            else:
                self._seconds[phase] += value

    def lap(self) -> dict[str, float]:
        """Return seconds by phase, and of the whole step under "step", and begin the next step."""
        whole = time.monotonic() - self._began
        return {**self.between(), _STEP: whole}

    def seconds(self, phase: str) -> float:
        """Return how long a phase has lasted in this step so far."""
        return self._seconds.get(phase, 0.0)

    def between(self) -> dict[str, float]:
        """Return seconds by phase of what lies between two steps, and begin the next step."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._began = time.monotonic()
        return seconds


def describe_batch(batch: Batch, advantages: Advantages, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return loss/*, policy/response_length, and the share of the trained groups whose rewards are all equal."""
    alike = share_without_spread([batch.groups[at] for at in trained_groups(batch, algorithm)])
    rewards = [sample.reward for group in batch.groups for sample in group.scored_samples]
    lengths_N = torch.tensor([length for group in batch.groups for length in group.response_lengths]).double()
    final = {"loss/avg_final_rewards": (sum(rewards) - advantages.penalties) / len(rewards)} if rewards else {}
    return {
        **final,
        **({} if alike is None else {TRAINED_WITHOUT_SPREAD: alike}),
        "loss/avg_raw_advantages": advantages.mean,
        ADVANTAGE: advantages.mean_abs,
        "policy/response_length": lengths_N.mean().item(),
    }


def describe_mini_batches(minis: Sequence[MiniBatch]) -> dict[str, float]:
    """Return the ranks' idle share, the tokens left out by min_filter_prefix_tokens, and the share of tokens computed once for several
    samples."""
    waits = [idle_share(mini.plan.shares, mini.plan.train, mini.plan.quadratic) for mini in minis]
    unscored = sum(mini.unscored for mini in minis)
    tokens, computed = (
        sum(map(sum, parts)) for parts in zip(*((mini.plan.lengths, mini.plan.computed) for mini in minis), strict=True)
    )
    return {
        "throughput/idle_share": sum(waits) / len(waits),
        "policy/shared_prefix_tokens": float(sum(mini.left_out for mini in minis)),
        **({"policy/unscored_samples": float(unscored)} if unscored else {}),
        **({"throughput/shared_token_share": 1 - computed / tokens} if computed < tokens else {}),
    }


def advantage_histogram(minis: Sequence[MiniBatch], data: World) -> Histogram | None:
    """Return how the advantages of all trained tokens are distributed, as they enter the loss. Every rank calls it."""
    trained = [
        mini.rows.scores.advantages[mini.rows.loss_mask > 0].double()
        for mini in minis
        if mini.rows.scores.advantages is not None
    ]
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *trained])
    values = values[values.isfinite()]
    ends = [-values.min().item(), values.max().item()] if len(values) else [-math.inf, -math.inf]
    negative_low, high = data.max(ends)
    low = -negative_low
    if low > high:
        return None
    bins = 20 if high > low else 1
    places = (
        ((values - low) / (high - low) * bins).floor().clamp(0, bins - 1) if high > low else torch.zeros(len(values))
    )
    counts = data.sum(torch.bincount(places.long(), minlength=bins).double().tolist())
    return Histogram(low, high, [round(count) for count in counts])


def mismatch_histogram(updates: Sequence[UpdateResult]) -> Histogram | None:
    """Return how the powers of ten of the differences between log-probabilities of engines and trainer are distributed."""
    names = sorted(name for update in updates[:1] for name in update.sums if name.startswith(MISMATCH))
    counts = [round(sum(update.sums[name] for update in updates)) for name in names]
    return Histogram(*MISMATCH_RANGE, counts) if any(counts) else None


def describe_updates(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Return policy/* of each optimizer step, averaged over the optimizer steps: the loss as it was reduced, all else as means.

    policy/logprob_mismatch is of the first one alone, and missing without tokens that trainer and engine computed with the same weights.
    """
    first = updates[0].sums
    each = [_describe_update(update) for update in updates]
    found = {name: combined(name, [values[name] for values in each]) for name in each[0]}
    if first.get("current_tokens"):
        found["policy/logprob_mismatch"] = first["current_abs_diff"] / first["current_tokens"]
    for name in dict.fromkeys(name for update in updates for name in update.report.experts):
        found[name] = combined(name, [update.report.experts[name] for update in updates if update.report.experts])
    scale = max(update.report.loss_scale for update in updates)
    found |= {"policy/loss_scale": scale} if scale != 1.0 else {}
    return found | {"policy/skipped_updates": float(sum(update.report.skipped for update in updates))}


def combined(name: str, values: Sequence[float]) -> float:
    """Return what several optimizer steps reported under one name, as one number: the mean, or the extreme that the name asks for."""
    if name.endswith(_EXTREMES):
        return (max if name.endswith("_max") else min)(values)
    return sum(values) / len(values)


def _describe_update(update: UpdateResult) -> dict[str, float]:
    sums, count = update.sums, max(update.sums["tokens"], 1.0)
    described = {
        "policy/final_loss": sums["final_loss"],
        "policy/policy_loss": sums["policy_loss"],
        "policy/policy_lr": update.report.lr,
        GRADIENT: update.report.grad_norm,
    }
    described |= {"policy/policy_entropy": sums["entropy"] / count} if "entropy" in sums else {}
    if "abs_diff" in sums:
        described |= {
            "policy/rollout_train_logprobs_abs_diff_mean": sums["abs_diff"] / count,
            "policy/rollout_train_logprobs_abs_diff_std": _deviation(sums["abs_diff"], sums["abs_diff_squared"], count),
        }
    described |= {f"policy/loss_metrics/{name}": value for name, value in loss_metrics(sums).items()}
    if TEACHER_DIVERGENCE in sums:
        described[DIVERGENCE] = sums[TEACHER_DIVERGENCE] / count
    described |= {"policy/policy_kl": sums["policy_kl"] / count} if "policy_kl" in sums else {}
    described |= answer_means(sums)
    pairs = max(sums.get("pairs", 0.0), 1.0)
    described |= {name.removeprefix(PER_PAIR): sums[name] / pairs for name in sums if name.startswith(PER_PAIR)}
    return described | {f"policy/{name}": sums[name] for name in ("positive_nll", "observation_nll") if name in sums}


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of policy loss and correction, from the sums of one optimizer step: means over trained tokens or samples."""
    tokens, samples = max(sums["tokens"], 1.0), max(sums["samples"], 1.0)
    found = {name.removeprefix(LOSS_METRICS): value for name, value in sums.items() if name.startswith(LOSS_METRICS)}
    squared = found.pop("is_ratio_squared", None)
    means = {
        name: _extreme(value) if name.endswith(_EXTREMES) else value / (samples if name in PER_SAMPLE else tokens)
        for name, value in found.items()
    }
    if squared is not None:
        means["is_ratio_std"] = _deviation(found["is_ratio_mean"], squared, tokens)
    return means


def _extreme(value: float) -> float:
    return value if math.isfinite(value) else 0.0  # of no token at all


def _deviation(total: float, squared: float, count: float) -> float:
    """Return the standard deviation from a sum and a sum of squares; unbiased, as torch.std."""
    variance = (squared / count - (total / count) ** 2) * count / max(count - 1, 1.0)
    return math.sqrt(max(0.0, variance))  # rounding may push a tiny variance below 0


def describe_cost(
    batch: Batch, seconds: dict[str, float], world: World, flops: float, peak_tflops: float | None = None
) -> dict[str, float]:
    """Return timing/*, throughput/* and memory/*: seconds of rank 0, memory of the rank that needs most. All ranks call it.

    Args:
        flops: of the policy's updates in this step.
        peak_tflops: trainer.peak_tflops.
    """
    tokens = sum(length for group in batch.groups for length in group.lengths)
    found = describe_times(seconds) | {
        "throughput/tokens_per_second": tokens / seconds[_STEP],
        "throughput/wait_share": seconds.get(_BATCH, 0.0) / seconds[_STEP],
    }
    if (trained := seconds.get("policy_train")) is not None:  # not where the critic is trained alone
        found["throughput/train_tokens_per_second_per_rank"] = tokens / trained / world.size
        found |= describe_flops(flops, trained, world.size, world.device, peak_tflops)
    return found | describe_memory(world)


def describe_memory(world: World) -> dict[str, float]:
    """Return memory/*, each of the rank with the highest value: host memory now and its peak, GPU memory now and its peak since the last
    call."""
    now, most = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found = {"memory/host_gib": now, "memory/peak_host_gib": max(now, most)}  # Linux counts the latter less exactly
    if world.device.type == "cuda":
        found |= {
            "memory/device_gib": torch.cuda.memory_allocated(),
            "memory/peak_device_gib": torch.cuda.max_memory_allocated(),
            "memory/peak_reserved_device_gib": torch.cuda.max_memory_reserved(),
        }
        torch.cuda.reset_peak_memory_stats()
    return dict(zip(found, world.max([size / GIB for size in found.values()]), strict=True))


def describe_times(seconds: dict[str, float]) -> dict[str, float]:
    return {f"timing/{phase}": value for phase, value in seconds.items()}


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Return the log line of a trained step: mean reward after penalties, loss, seconds."""
    named = {"reward": "loss/avg_final_rewards", "loss": "policy/final_loss", "grad norm": "policy/grad_norm"}
    parts = [f"{name} {metrics[metric]:.4g}" for name, metric in named.items() if metric in metrics]
    return f"step {step}/{total}: {', '.join(parts)}, {metrics['timing/step']:.1f} s"
