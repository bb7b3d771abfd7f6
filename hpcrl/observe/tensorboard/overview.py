"""Builds the overview of a run: TensorBoard's Custom Scalars charts of reported metrics."""

# protoc's modules have their names only at run time.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Collection, Mapping

from tensorboard.plugins.custom_scalar import layout_pb2

from hpcrl.observe.charts import ATTEMPT, SHARE, charts_of
from hpcrl.observe.metrics import Record
from hpcrl.observe.summary import STEP_SECONDS

_TIMING = "timing/"
_PARTS_OF_OTHERS = (STEP_SECONDS, "timing/publish_weights", "timing/offload")
_WAITS_FOR_POLICY = "timing/wait_for_policy"
_OF_CRITICS_RANKS = (_WAITS_FOR_POLICY, "timing/critic_train")  # at the same time, where it has ranks of its own
_ALWAYS = ("reward/", "eval/")
_OF_THE_CONFIGURATION = ("trainer/global_step", "trainer/total_steps", "trainer/steps_per_epoch")


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
    layout = layout_pb2.Layout()
    for chart, _ in charts_of(tags, success_reward):
        if not layout.category or layout.category[-1].title != chart.category:
            layout.category.add(title=chart.category)
        whole = [f"^{tag}$" for tag in chart.tags]
        layout.category[-1].chart.add(title=chart.title, multiline=layout_pb2.MultilineChartContent(tag=whole))
    return layout.SerializeToString()
