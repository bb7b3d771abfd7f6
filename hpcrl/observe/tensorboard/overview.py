"""Builds the overview of a run: TensorBoard's Custom Scalars charts of reported metrics."""

# protoc's modules have their names only at run time.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tensorboard.plugins.custom_scalar import layout_pb2

from hpcrl.observe.metrics import Record
from hpcrl.observe.scores import SUCCESS
from hpcrl.observe.summary import STEP_SECONDS

ATTEMPT = "resilience/attempt"
SHARE = "time_share/"
_TIMING, _WAITING = "timing/", "timing/wait_for_generation_buffer"
_PARTS_OF_OTHERS = (STEP_SECONDS, "timing/publish_weights", "timing/offload")
_WAITS_FOR_POLICY = "timing/wait_for_policy"
_OF_CRITICS_RANKS = (_WAITS_FOR_POLICY, "timing/critic_train")  # at the same time, where it has ranks of its own
_ALWAYS = ("reward/", "eval/")
_OF_THE_CONFIGURATION = ("trainer/global_step", "trainer/total_steps", "trainer/steps_per_epoch")


class Chart(NamedTuple):
    category: str
    title: str
    tags: str


CHARTS = (
    Chart("Reward", "mean reward of training samples", r"^reward/avg_raw_reward$"),
    Chart("Reward", "groups with a solved sample ({solved})", r"^reward/avg_pass_at_\d+$"),
    Chart(
        "Reward", "share of groups whose samples all have the same reward", r"^reward/(trained_)?groups_without_spread$"
    ),
    Chart("Evaluation", "score", r"^eval/[^/]+/avg_score$"),
    Chart("Evaluation", "validation loss", r"^eval/[^/]+/loss$"),
    Chart("Loss", "loss", r"^policy/final_loss$"),
    Chart("KL and entropy", "KL divergence from the reference", r"^(policy/policy_kl|loss/avg_kl)$"),
    Chart("KL and entropy", "entropy", r"^policy/policy_entropy$"),
    Chart("KL and entropy", "log-probabilities: engine against trainer", r"^policy/logprob_mismatch$"),
    Chart("Length", "tokens per response", r"^generate/(min|avg|max)_num_tokens$"),
    Chart("Length", "responses that ended by themselves", r"^generate/stop_ratio$"),
    Chart("Staleness", "steps between policy and samples", r"^async/staleness_(mean|max)$"),
    Chart("Speed", "tokens per second", r"^throughput/tokens_per_second$"),
    Chart("Speed", "seconds per step", r"^timing/step$"),
    Chart("Share of time per role", "trainer: phases of a step", rf"^{SHARE}trainer/"),
    Chart("Share of time per role", "waiting", rf"^({SHARE}trainer/wait_.*|generate/idle_ratio/.*)$"),
    Chart("Memory", "peaks, GiB", r"^memory/(critic_)?peak_"),
    Chart("Interruptions", "attempt that trained a step", rf"^{ATTEMPT}$"),
)


def is_always_shown(tag: str) -> bool:
    """Return whether a metric is informative where it is 0 all the time."""
    return tag.startswith(_ALWAYS)


def points_of(record: Record, several_attempts: bool) -> Mapping[str, float]:
    """Return the shown metrics of a record, with the shares of a step's time. Metrics that repeat the configuration are left out; with `several_attempts` the attempt that trained it is added."""
    points = {tag: value for tag, value in record.metrics.items() if tag not in _OF_THE_CONFIGURATION}
    if seconds := record.metrics.get(STEP_SECONDS):
        others = _PARTS_OF_OTHERS + (_OF_CRITICS_RANKS if _WAITS_FOR_POLICY in record.metrics else ())
        points |= {
            f"{SHARE}{record.process}/{tag.removeprefix(_TIMING)}": value / seconds
            for tag, value in record.metrics.items()
            if tag.startswith(_TIMING) and tag not in others
        }
        if several_attempts:
            points[ATTEMPT] = record.attempt
    return points


def layout_of(tags: Collection[str], success_reward: float) -> bytes:
    """Return the layout of the charts that have one of these tags; empty where none has.

    Args:
        success_reward: generator.success_reward, which titles state.
    """
    solved = f"reward ≥ {success_reward:g}, or {SUCCESS}"
    layout = layout_pb2.Layout()
    for chart in CHARTS:
        if any(map(re.compile(chart.tags).search, tags)):
            if not layout.category or layout.category[-1].title != chart.category:
                layout.category.add(title=chart.category)
            layout.category[-1].chart.add(
                title=chart.title.format(solved=solved), multiline=layout_pb2.MultilineChartContent(tag=[chart.tags])
            )
    return layout.SerializeToString()
