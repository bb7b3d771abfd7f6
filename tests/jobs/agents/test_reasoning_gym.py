"""Tasks of reasoning-gym, from the package itself, as a run draws and scores them (configs/recipes/reasoning_gym_tasks.py)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.controller.build import load_prompts
from hpcrl.envs.registry import make_environment
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from tests.jobs.agents.test_packages import ENVIRONMENTS
from tests.paths import CONFIGS, QUICKSTART

TASKS = {"leg_counting": {"max_animals": 3}, "spell_backward": {}, "basic_arithmetic": {}, "countdown": {}}


@pytest.mark.agents
def test_tasks_by_their_names_are_drawn_without_end_and_score_their_own_solutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS / "reasoning_gym"))
    monkeypatch.syspath_prepend(str(CONFIGS / "recipes"))
    assert importlib.import_module("reasoning_gym")
    given = [
        "data.train_data=[]", "data.train_function=reasoning_gym_tasks:rows", "trainer.max_prompt_length=4096",
        f"data.train_function_args={{tasks={_toml(TASKS)}}}", "environment.env_class=reasoning_gym_tasks:Task",
        "data.val_data=[]", "trainer.eval_interval=0", "generator.sampling_params.max_generate_length=64",
    ]  # fmt: skip
    config = Config.from_toml([QUICKSTART], given)
    train, _, _ = load_prompts(config, StatusWriter(Run(tmp_path), "controller", 1))
    seen = set[str]()
    for index in [*range(40), 10**6]:
        prompt = train[index]
        seen.add(prompt.data_source)
        environment = make_environment(prompt.env_class, json.loads(json.dumps(prompt.extras)))
        solution = environment.solution()
        assert solution
        assert environment.step(solution).reward == 1.0, prompt
        assert environment.step("I do not know").reward == 0.0
    assert seen == TASKS.keys()
    assert len({json.dumps(train[index].messages) for index in range(40)}) > 35
    other = Config.from_toml([QUICKSTART], [*given, "trainer.seed=8"])
    again = load_prompts(other, StatusWriter(Run(tmp_path), "controller", 1))[0]
    assert [again[index].messages for index in range(8)] != [train[index].messages for index in range(8)]


def _toml(value: object) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{" + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + "}"
