"""Traces: the steps that were asked for, and what training did in them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.sections.profiler import ProfilerConfig
from hpcrl.trainer.distributed import World
from hpcrl.trainer.profiling.steps import profiled
from tests.trainer.material import make_run


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def work(steps: int, config: ProfilerConfig, path: Path, world: World) -> Path:
    run = make_run(path)
    with profiled(config, run, 2, world) as stepped:
        for _ in range(steps):
            torch.ones(8, 8) @ torch.ones(8, 8)
            stepped()
    return run.profile_of(2, world.rank)


@pytest.mark.parametrize(("steps", "recorded"), [(9, ["#3", "#4"]), (4, ["#3"])])
def test_the_steps_that_were_asked_for(tmp_path: Path, alone: World, steps: int, recorded: list[str]) -> None:
    config = ProfilerConfig(enable=True, wait_steps=1, warmup_steps=2, active_steps=2, record_shape=True)
    trace = events(work(steps, config, tmp_path / "run", alone))
    seen = {event["name"] for event in trace if event["name"].startswith("ProfilerStep")}
    assert {f"ProfilerStep{step}" for step in recorded} <= seen
    products = [event for event in trace if event["name"] == "aten::mm"]
    assert len(products) == len(recorded)
    assert products[0]["args"]["Input Dims"][:2] == [[8, 8], [8, 8]]


def test_nothing_is_written_where_nothing_was_asked_for(tmp_path: Path, alone: World) -> None:
    assert not work(2, ProfilerConfig(enable=True), tmp_path / "too-short", alone).exists()
    config = ProfilerConfig(enable=True, ranks=[1])
    assert not work(5, config, tmp_path / "other-rank", alone).exists()
    assert not work(5, replace(config, enable=False, ranks=[0]), tmp_path / "off", alone).exists()
