"""What a trained batch looks like in numbers: the trainer's metrics, under SkyRL's names."""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hpcrl.trainer.update import Trained
from hpcrl.trainer.world import World
from hpcrl.types import Batch


class Clock:
    """Adds up the seconds of each phase; a step ends with `lap`, what follows until `between` belongs to no step."""

    def __init__(self) -> None:
        self._pace: float | None = None
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[phase] += time.monotonic() - began

    def lap(self) -> dict[str, float]:
        """Return seconds by phase, and of the whole step under "step", and begin the next step."""
        whole = time.monotonic() - self._began
        self._pace = whole if self._pace is None else 0.8 * self._pace + 0.2 * whole
        return {**self.between(), "step": whole}

    def between(self) -> dict[str, float]:
        """Return seconds by phase of what lies between two steps, and begin the next step."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._began = time.monotonic()
        return seconds

    def pace(self) -> dict[str, float]:
        """Return the running mean of a step's seconds, for people; empty before the first step."""
        return {} if self._pace is None else {"seconds_per_step": self._pace}


def describe_batch(batch: Batch, advantages: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return loss/* and policy/response_length, from metadata alone."""
    rewards = [reward for group in batch.groups for reward in group.rewards]
    lengths_N = torch.tensor([length for group in batch.groups for length in group.response_lengths]).double()
    advantages_N = torch.cat(list(advantages)).double()
    tokens = max(lengths_N.sum().item(), 1.0)
    return {
        "loss/avg_final_rewards": sum(rewards) / len(rewards),
        "loss/avg_raw_advantages": (advantages_N * lengths_N).sum().item() / tokens,
        "loss/avg_raw_advantages_abs": (advantages_N.abs() * lengths_N).sum().item() / tokens,
        "policy/response_length": lengths_N.mean().item(),
    }


def describe_updates(updates: Sequence[Trained]) -> dict[str, float]:
    """Return policy/*: token means of each optimizer step, averaged over the optimizer steps."""
    each = [_describe_update(update) for update in updates]
    means = {name: sum(values[name] for values in each) / len(each) for name in each[0]}
    return means | {"policy/skipped_updates": float(sum(update.report.skipped for update in updates))}


def _describe_update(update: Trained) -> dict[str, float]:
    count = max(update.sums["tokens"], 1.0)
    mean = {name: value / count for name, value in update.sums.items()}
    # unbiased, as torch.std; rounding may push a tiny variance below 0
    variance = max(0.0, mean["abs_diff_squared"] - mean["abs_diff"] ** 2) * count / max(count - 1, 1.0)
    described = {
        "policy/final_loss": mean["final_loss"],
        "policy/policy_loss": mean["policy_loss"],
        "policy/policy_entropy": mean["entropy"],
        "policy/policy_lr": update.report.lr,
        "policy/grad_norm": update.report.grad_norm,
        "policy/loss_metrics/clip_ratio": mean["clip_ratio"],
        "policy/loss_metrics/ratio": mean["ratio"],
        "policy/rollout_train_logprobs_abs_diff_mean": mean["abs_diff"],
        "policy/rollout_train_logprobs_abs_diff_std": math.sqrt(variance),
    }
    return described | ({"policy/policy_kl": mean["policy_kl"]} if "policy_kl" in mean else {})


def describe_cost(batch: Batch, seconds: dict[str, float], world: World) -> dict[str, float]:
    """Return timing/*, throughput/* and memory/*: seconds of rank 0, peaks of the rank that needs most."""
    tokens = sum(length for group in batch.groups for length in group.lengths)
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]
    if world.device.type == "cuda":
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
    names = ["memory/peak_host_gib", "memory/peak_device_gib"]
    return {
        **describe_times(seconds),
        "throughput/tokens_per_second": tokens / seconds["step"],
        "throughput/train_tokens_per_second_per_rank": tokens / seconds["policy_train"] / world.size,
        **dict(zip(names, world.max(peaks), strict=False)),
    }


def describe_times(seconds: dict[str, float]) -> dict[str, float]:
    return {f"timing/{phase}": value for phase, value in seconds.items()}
