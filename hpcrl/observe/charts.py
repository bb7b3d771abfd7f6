"""Charts of a run's most important metrics, in the order in which people read them, for reports and TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from hpcrl.observe.scores import SUCCESS

ATTEMPT = "resilience/attempt"
SHARE = "time_share/"


class Chart(NamedTuple):
    """One chart.

    Attributes:
        title: in words; `{solved}` is what counts as solved.
        tags: patterns of whole names of metrics, the most important one first.
    """

    category: str
    title: str
    tags: tuple[str, ...]


CHARTS = (
    Chart("Reward", "Reward", ("reward/avg_raw_reward", "eval/all/avg_score")),
    Chart("Reward", "Groups with a solved sample ({solved})", (r"reward/avg_pass_at_\d+",)),
    Chart(
        "Reward",
        "Groups with equal rewards",
        ("reward/groups_without_spread", "reward/trained_groups_without_spread"),
    ),
    Chart("Evaluation", "Evaluation score", (r"eval/[^/]+/avg_score",)),
    Chart("Evaluation", "Validation loss", (r"eval/[^/]+/loss",)),
    Chart("Loss", "Loss", ("policy/final_loss",)),
    Chart("Loss", "Pairs ranked right", ("policy/loss_metrics/rewards/accuracies",)),
    Chart("Loss", "Size of advantages", ("loss/avg_raw_advantages_abs",)),
    Chart("Loss", "Gradient norm", ("policy/grad_norm",)),
    Chart("Loss", "Learning rate", ("policy/policy_lr",)),
    Chart("KL and entropy", "KL divergence from the reference", ("policy/policy_kl", "loss/avg_kl")),
    Chart("KL and entropy", "Entropy, nats per token", ("policy/policy_entropy",)),
    Chart("KL and entropy", "Tokens clipped", ("policy/loss_metrics/clip_ratio",)),
    Chart(
        "KL and entropy",
        "Log-probabilities: engine against trainer",
        ("policy/rollout_train_logprobs_abs_diff_mean", "policy/logprob_mismatch"),
    ),
    Chart("Samples", "Tokens per response", ("generate/avg_num_tokens", "generate/(min|max)_num_tokens")),
    Chart("Samples", "Responses that ended by themselves", ("generate/stop_ratio",)),
    Chart("Samples", "Samples that failed", ("generate/failed_samples",)),
    Chart("Samples", "Groups dropped by dynamic sampling", ("generate/dropped_groups",)),
    Chart("Staleness", "Steps between policy and samples", ("async/staleness_mean", "async/staleness_max")),
    Chart("Speed", "Tokens per second", ("throughput/tokens_per_second",)),
    Chart("Speed", "Seconds per step", ("timing/step",)),
    Chart("Speed", "Seconds of a step: training, and waiting for samples", ("timing/policy_train", "timing/wait_for_generation_buffer")),
    Chart("Speed", "Engines idle, share of the time", (r"generate/idle_ratio(/.*)?",)),
    Chart("Speed", "Pause for new weights, seconds", (r"weights/pause_seconds(/.*)?",)),
    Chart("Share of time per role", "Trainer: phases of a step", (f"{SHARE}trainer/.*",)),
    Chart("Memory", "Peaks, GiB", ("memory/(critic_)?peak_.*",)),
    Chart("Interruptions", "Attempt that trained a step", (ATTEMPT,)),
)  # fmt: skip


def charts_of(names: Collection[str], success_reward: float) -> Iterator[tuple[Chart, list[str]]]:
    """Yield the charts that show one of these metrics, with their title complete, and those metrics, the most important one first.

    Args:
        success_reward: generator.success_reward, which titles state.
    """
    solved, ordered = f"reward ≥ {success_reward:g}, or {SUCCESS}", sorted(names)
    for chart in CHARTS:
        found = dict.fromkeys(name for tag in chart.tags for name in ordered if re.fullmatch(tag, name))
        if found:
            yield chart._replace(title=chart.title.format(solved=solved)), list(found)
