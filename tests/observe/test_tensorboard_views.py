"""What TensorBoard shows beside curves: the overview, hyperparameters, texts, histograms. Read back with TensorBoard's own accumulator."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata as hparams

from hpcrl.config import Config
from hpcrl.observe.metrics import Histogram, MetricsWriter, Record
from hpcrl.observe.tensorboard.event_file import EventFile, rebuild
from hpcrl.observe.tensorboard.overview import SHARE, points_of
from hpcrl.rundir.commit import write_bytes, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.starts import note
from tests.paths import QUICKSTART

STEP = {"timing/step": 2.0, "timing/wait_for_generation_buffer": 0.5, "timing/policy_train": 1.0}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "project" / "rate.0-lr-1e-4")
    config = Config.from_toml([QUICKSTART], ["trainer.policy.optimizer_config.lr=1e-4"])
    write_text(run.config, config.to_toml())
    write_json(run.submission, {"overrides": ["trainer.policy.optimizer_config.lr=1e-4"]})
    return run


def shown(run: Run) -> EventAccumulator:
    found = EventAccumulator(str(run.events), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    found.Reload()
    return found


def text(events: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]


def categories(events: EventAccumulator) -> dict[str, list[str]]:
    (event,) = events.Tensors("custom_scalars__config__")
    layout: Any = Layout.FromString(event.tensor_proto.string_val[0])
    return {each.title: [chart.title for chart in each.chart] for each in layout.category}


def test_the_overview_has_what_the_run_reports(run: Run) -> None:
    events = EventFile(run)
    with MetricsWriter(run, "controller", 1, 0) as controller, MetricsWriter(run, "trainer", 1, 0) as trainer:
        controller.write(0, {"eval/all/avg_score": 0.0})
        controller.write(1, {"reward/avg_raw_reward": 0.0, "async/staleness_max": 0.0, "trainer/total_steps": 9.0})
        trainer.write(1, {**STEP, "policy/policy_entropy": 0.5, "policy/skipped_updates": 0.0})
        events.update()
        assert list(categories(shown(run))) == [
            "Reward",
            "Evaluation",
            "KL and entropy",
            "Speed",
            "Share of time per role",
        ]
        assert categories(shown(run))["Reward"] == ["Reward"]
        tags = shown(run).Tags()["scalars"]
        assert "time_share/trainer/policy_train" in tags
        assert not {"async/staleness_max", "trainer/total_steps", "policy/skipped_updates"} & set(tags)
        controller.write(2, {"reward/avg_raw_reward": 0.0, "async/staleness_max": 1.0, "trainer/total_steps": 9.0})
        events.update()
    assert categories(shown(run))["Staleness"] == ["Steps between policy and samples"]
    assert [(event.step, event.value) for event in shown(run).Scalars("async/staleness_max")] == [(1, 0), (2, 1)]
    assert [event.value for event in shown(run).Scalars("time_share/trainer/policy_train")] == [0.5]
    assert [event.value for event in shown(run).Scalars("reward/avg_raw_reward")] == [0, 0]
    events.close()


@pytest.mark.parametrize(("apart", "shares"), [({}, 2), ({"timing/wait_for_policy": 0.5}, 1)])
def test_shares_of_time_are_those_of_one_rank(apart: dict[str, float], shares: int) -> None:
    """A critic beside the policy takes its part of a step; one on ranks of its own trains at the same time."""
    metrics = {"timing/step": 2.0, "timing/policy_train": 1.0, "timing/critic_train": 1.0, **apart}
    points = points_of(Record("trainer", 1, 1, 0.0, metrics), several_attempts=False)
    assert [value for tag, value in points.items() if tag.startswith(SHARE)] == [0.5] * shares
    assert points["timing/critic_train"] == 1.0


def test_hyperparameters_and_configuration(run: Run) -> None:
    rebuild(run)
    contents = shown(run).PluginTagToContent("hparams")
    experiment = hparams.parse_experiment_plugin_data(contents[hparams.EXPERIMENT_TAG])
    start = hparams.parse_session_start_info_plugin_data(contents[hparams.SESSION_START_INFO_TAG])
    assert [info.display_name for info in experiment.hparam_infos if info.differs] == ["lr"]
    assert start.hparams["trainer.policy.optimizer_config.lr"].number_value == 1e-4
    assert start.hparams["trainer.algorithm.advantage_estimator"].string_value == "grpo"
    assert next(info.name.tag for info in experiment.metric_infos) == "eval/all/avg_score"
    ((_, said),) = text(shown(run), "run/configuration")
    assert "    max_prompt_length = 16\n" in said
    assert "hf_save_interval" not in said, "what has its default is not repeated"


def test_samples_of_evaluations(run: Run) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"question {row}"}], "response": "<b>\n# no heading", "score": row / 2, "stop_reason": "stop",
         "group_id": f"e000010-{row:08d}", "sample": sample}
        for row in (7, 3, 1, 2, 0) for sample in (0, 1)
    ]  # fmt: skip
    write_text(run.eval_dump(10, 0), "".join(json.dumps(row) + "\n" for row in rows) + '{"half')
    Image.new("RGB", (3, 2)).save(content := BytesIO(), "PNG")
    write_bytes(run.shown_picture("e000010-00000001", 0), content.getvalue())
    with MetricsWriter(run, "controller", 1, 0) as writer:
        writer.write(10, {"eval/all/avg_score": 0.5})
        writer.write(20, {"eval/all/avg_score": 0.5})  # of which no samples are kept
    rebuild(run)
    rebuild(run)
    ((step, said),) = text(shown(run), "evaluation/samples")
    assert step == 10
    assert [line for line in said.split("\n") if line.startswith("**")] == [
        f"**row {row}: reward {row / 2:g}**, stop" for row in range(4)
    ]
    assert "    user: question 3\n" in said
    assert "\n    <b>\n    # no heading" in said
    events, event = shown(run), (10, 3, 2, content.getvalue())
    assert [
        (one.step, one.width, one.height, one.encoded_image_string) for one in events.Images("evaluation/row 1/0")
    ] == [event]
    assert events.Tags()["images"] == ["evaluation/row 1/0"]


def test_histograms(run: Run) -> None:
    with MetricsWriter(run, "controller", 1, 0) as writer:
        writer.write(1, {"x": 1.0}, {"reward": Histogram.of([0.0, 0.0, 1.0, float("nan")]), "none": Histogram.of([])})
        writer.write(2, {"x": 1.0}, {"reward": Histogram.of([0.5])})
    with MetricsWriter(run, "controller", 2, 1) as writer:
        writer.write(2, {"x": 1.0}, {"reward": Histogram.of([2.0, 4.0])})
    rebuild(run)
    first, second = shown(run).Histograms("z_distribution/reward")
    value = first.histogram_value
    assert (value.min, value.max, value.num, value.bucket[0], value.bucket[-1]) == (0, 1, 3, 2, 1)
    assert (second.step, second.histogram_value.min, second.histogram_value.max) == (2, 2, 4)
    assert "z_distribution/none" not in shown(run).Tags()["histograms"]


def test_attempts_and_summary(run: Run) -> None:
    open_attempt(run, "1", ["n1"])
    note(run, {"attempt": 1, "from": None})
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        for step in (1, 2, 3):
            writer.write(step, STEP)
    rebuild(run)
    assert "resilience/attempt" not in shown(run).Tags()["scalars"]
    report_outcome(run, 1, "interrupted", "preempted | by <other>", "agent-0")
    open_attempt(run, "2", ["n1"])
    note(run, {"attempt": 2, "from": "s000002"})
    events = EventFile(run)
    with MetricsWriter(run, "trainer", 2, 2) as writer:
        for step in (3, 4):
            writer.write(step, STEP)
    events.update()
    events.close()
    found = shown(run)
    assert [(event.step, event.value) for event in found.Scalars("resilience/attempt")] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]
    ((_, said),) = text(found, "run/attempts")
    assert "interrupted: preempted \\| by &lt;other>" in said
    assert "| 2 |" in said.splitlines()[-1]
    assert text(found, "run/summary")[-1][0] == 4
    assert "| steps | 4 |" in text(found, "run/summary")[-1][1]


def test_the_events_of_an_earlier_version_go(run: Run) -> None:
    write_text(run.tensorboard / "events.out.tfevents.1700000000.n1", "old")
    rebuild(run)
    assert [path.name for path in run.tensorboard.iterdir()] == [run.name]


def test_bytes_per_step(run: Run) -> None:
    """A few MB per 1,000 steps, as `MOST_BYTES` of tests/jobs/test_growth.py has it of a whole run."""
    names = [f"policy/loss_metrics/{number}" for number in range(40)]
    shape = Histogram.of([number / 100 for number in range(512)])
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        for step in range(1, 101):
            writer.write(step, {**STEP, **dict.fromkeys(names, 0.5)}, dict.fromkeys("abcd", shape))
    rebuild(run)
    assert sum(path.stat().st_size for path in run.events.iterdir()) < 100 * 4500
