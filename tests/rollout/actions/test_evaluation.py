"""A policy whose actions a flow makes is evaluated by the real engine in the simulated arm: its episodes are dumped, and filmed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from PIL import Image

from hpcrl.config import Config
from hpcrl.controller.evaluation import evaluation_work
from hpcrl.data.datasets import counted_prompts, load_dataset
from hpcrl.data.prompts import drop_long
from hpcrl.data.sources import validation_sources
from hpcrl.families.pi05.engine import Actions
from hpcrl.rollout.evaluate import evaluate
from hpcrl.rollout.family import load_generator
from hpcrl.rundir.layout import Run
from hpcrl.types import GroupMeta
from tests.paths import CONFIGS
from tests.trainer.backends.actions.material import configured

pytest.importorskip("mujoco")

VERSION, EPISODES = 3, 2


def evaluated(place: Run, config: Config) -> list[GroupMeta]:
    """Return the groups of the first rows of the validation set, as jobs/eval.py makes them."""
    data, generator = config.data, config.generator
    prompts = load_dataset(
        validation_sources(data, data.val_data),
        ("eval",),
        data,
        config.environment,
        generator.max_turns,
        first=EPISODES,
    )
    work = evaluation_work(drop_long(prompts, *counted_prompts(config)), VERSION, 1, seed=5)
    launched, family = Actions(config), load_generator(place, config, None)
    launched.wait_ready(120)
    maker = family.maker()
    return asyncio.run(evaluate(place, launched, maker, family.decode, work, VERSION, generator, lambda _: None))


def test_episodes_are_dumped_and_filmed(tmp_path: Path) -> None:
    model = CONFIGS / "reach_pi05" / "model"
    place = Run(tmp_path / "run")
    place.path.mkdir()
    groups = evaluated(place, configured(model, "vla.save_video=true"))
    lines = [json.loads(line) for line in place.eval_dump(VERSION, 0).read_text().splitlines()]
    assert len(groups) == len(lines) == EPISODES
    for group, line in zip(groups, sorted(lines, key=lambda line: line["group_id"]), strict=True):
        assert line["group_id"] == group.group_id
        assert line["score"] == group.rewards[0] == line["env_metrics"]["success"]
        turns = [part for part in line["parts"] if part["by"] == "policy"]
        assert sum(part["tokens"] for part in turns) == line["env_metrics"]["actions"]
        assert line["parts"][0]["text"].startswith("Task: reach, State: ")
        with Image.open(place.picture(f"{group.group_id}.0")) as video:
            assert video.size == (64, 64), "as the camera shows it, not as the policy sees it"
            assert getattr(video, "n_frames", 1) == len(turns) + 1, "before each turn, and at the end"
