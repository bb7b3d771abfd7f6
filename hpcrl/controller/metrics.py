"""Metrics of a training batch, from its groups' metadata, under SkyRL's names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from math import sqrt
from statistics import fmean

from hpcrl.algorithms.filters import share_without_spread
from hpcrl.controller.admission import staleness
from hpcrl.controller.lending import Lending
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.observe.goodput import SAMPLE_BATCHES
from hpcrl.observe.metrics import Histogram
from hpcrl.observe.scores import is_solved
from hpcrl.observe.summary import WITHOUT_SPREAD
from hpcrl.runtime.memory import GIB, resident
from hpcrl.text import metric_name
from hpcrl.types import Batch


def step_metrics(batch: Batch, schedule: Schedule, replicas: dict[str, float] | None) -> dict[str, float]:
    """Return the metrics of the batch of a step.

    Args:
        replicas: replicas/* and scorers/*; None: the batch has rows of datasets.
    """
    found = row_metrics(batch) if replicas is None else batch_metrics(batch, schedule.success_reward) | replicas
    dropped = dropped_metrics(batch) if schedule.sampling.config.type else {}
    found |= {} if batch.drawn is None else batch.drawn.metrics
    return found | dropped | (surplus_metrics(batch) if schedule.surplus else {})


def batch_metrics(batch: Batch, success_reward: float) -> dict[str, float]:
    """Return reward/*, generate/*, environment/* and async/* of one batch.

    Means are over the samples that have a value: one that failed has no reward, and what no sample has is left out.

    Args:
        success_reward: generator.success_reward.
    """
    groups = batch.groups
    n = len(groups[0].samples)
    scored = [group.scored_samples for group in groups]
    passed = [[is_solved(sample.reward, sample.env_metrics, success_reward) for sample in own] for own in scored]
    rewards = [sample.reward for own in scored for sample in own]
    lengths = [length for group in groups for length in group.response_lengths]
    by_raw_reward = [(sample.raw_reward, sample.response_length) for own in scored for sample in own]
    stale = [staleness(batch.step, group) for group in groups]
    reasons = [reason for group in groups for reason in group.stop_reasons]
    stopped = [reason == "stop" for reason in reasons if reason != "failed"]
    environment: dict[str, list[float]] = defaultdict(list)
    for sample in chain.from_iterable(scored):
        for name, value in sample.env_metrics.items():
            environment[metric_name(name)].append(value)
    alike = share_without_spread(groups, sum(worth is not None for worth in batch.dropped.values()))
    return {
        **({} if alike is None else {WITHOUT_SPREAD: alike}),
        **_means(
            {
                "reward/avg_raw_reward": rewards,
                "reward/mean_positive_reward": [max(reward, 0.0) for reward in rewards],
                f"reward/avg_pass_at_{n}": [any(solved) for solved in passed if solved],
                "generate/stop_ratio": stopped,
                "generate/avg_tokens_non_zero_rewards": [length for raw, length in by_raw_reward if raw > 0],
                "generate/avg_tokens_zero_rewards": [length for raw, length in by_raw_reward if raw == 0],
                **{f"environment/{name}": values for name, values in environment.items()},
            }
        ),
        "generate/min_num_tokens": min(lengths),
        "generate/max_num_tokens": max(lengths),
        "generate/avg_num_tokens": (mean := fmean(lengths)),
        "generate/std_num_tokens": sqrt(fmean((length - mean) ** 2 for length in lengths)),
        "generate/samples": len(reasons),
        "generate/rows": sum(len(group.lengths) for group in groups),
        "generate/failed_samples": sum(len(group.failures) for group in groups),
        "generate/group_seconds_max": max(group.seconds for group in groups),
        "async/staleness_mean": fmean(stale),
        "async/staleness_max": max(stale),
        "async/staleness_min": min(stale),
        "async/staleness_ratio": fmean(value > 0 for value in stale),
    }


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: fmean(each) for name, each in values.items() if each}


def batch_histograms(batch: Batch) -> dict[str, Histogram | None]:
    """Return how the rewards and the response lengths, in tokens, of one batch are distributed."""
    return {
        "reward": Histogram.of([sample.reward for group in batch.groups for sample in group.scored_samples]),
        "response_length": Histogram.of([length for group in batch.groups for length in group.response_lengths]),
    }


def controller_metrics(step: int, epoch: int, total_steps: int, steps_per_epoch: int) -> dict[str, float]:
    """Return progress of the run at a step, and the memory of the controller."""
    return {
        "trainer/global_step": step,
        "trainer/epoch": epoch,
        "trainer/total_steps": total_steps,
        "trainer/steps_per_epoch": steps_per_epoch,
        "memory/controller_host_gib": resident() / GIB,
    }


def row_metrics(batch: Batch) -> dict[str, float]:
    """Return data/* of one batch of rows of datasets."""
    groups = batch.groups
    sources = Counter(metric_name(group.data_source) for group in groups)
    return {
        "data/rows": len(groups),
        "data/tokens": sum(sum(group.lengths) for group in groups),
        "data/trained_tokens": sum(sum(group.response_lengths) for group in groups),
        "data/longest_row": max(max(group.lengths) for group in groups),
        **{f"data/rows_of/{name}": count for name, count in sources.items()},
    }


def replica_metrics(ready: int, replicas: int, restarts: int, taken_back: int, lending: Lending) -> dict[str, float]:
    """Return replicas/*; those that the trainer lends its GPUs to count for themselves."""
    return {
        **({"replicas/leases": lending.times.leases} if lending.lent else {}),
        "replicas/ready": ready,
        "replicas/total": max(replicas, ready),
        "replicas/restarts": restarts,
        "replicas/groups_taken_back": taken_back,
    }


def scorer_metrics(scores: ScoreQueue) -> dict[str, float]:
    """Return scorers/*; nothing where there are none."""
    if not scores.scorers:
        return {}
    return {
        "scorers/ready": len(scores.registry.workers),
        "scorers/total": len(scores.scorers),
        "scorers/restarts": scores.registry.restarts,
        "scorers/groups_taken_back": scores.taken_back,
        "scorers/groups_waiting": scores.waiting,
    }


def dropped_metrics(batch: Batch) -> dict[str, float]:
    """Return dynamic sampling's counts of the groups that were generated for one batch.

    filtered_positive and filtered_negative count the dropped groups by the mean of what they are judged by, their rewards as a rule:
    above 0, or not; filtered_failed counts those whose samples all failed.
    """
    worths = [worth for worth in batch.dropped.values() if worth is not None]
    positive = sum(worth > 0 for worth in worths)
    return {
        "generate/dropped_groups": len(batch.dropped),
        **_sample_batches(batch),
        "generate/filtered_positive": positive,
        "generate/filtered_negative": len(worths) - positive,
        "generate/filtered_failed": len(batch.dropped) - len(worths),
    }


def surplus_metrics(batch: Batch) -> dict[str, float]:
    """Return how many surplus groups one batch did not wait for and no later one may train."""
    return {"generate/given_up_groups": len(batch.given_up), **_sample_batches(batch)}


def _sample_batches(batch: Batch) -> dict[str, float]:
    return {SAMPLE_BATCHES: len(batch.generated) / len(batch.groups)}
