"""Tasks of reasoning-gym by their names, without end, each scored by its own check. `pip install reasoning-gym`, and

    python_path = ["configs/recipes"]

    [data]
    train_data = []
    train_function = "reasoning_gym_tasks:rows"
    train_function_args = {tasks = {leg_counting = {max_animals = 5}, spell_backward = {}}}

    [environment]
    env_class = "reasoning_gym_tasks:Task"

Rows take turns among the tasks. A task's settings are those of its configuration in reasoning-gym; sizes and seeds are not among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym

from hpcrl.envs.base import Environment, Turn
from hpcrl.errors import DataError

ASKED = "Think first. Give the answer, and nothing else, as <answer>your answer</answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def rows(seed: int, index: int, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row with this index.

    Args:
        tasks: settings by name of the task.
    """
    name = list(tasks)[index % len(tasks)]
    task = {"name": name, "seed": seed, "index": index, "settings": dict(tasks[name])}
    entry, _ = made(task)
    return {
        "prompt": f"{entry['question']}\n\n{ASKED}",
        "data_source": name,
        "reward_spec": {"ground_truth": str(entry["answer"])},
        "task": task,
    }


def made(task: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a task's entry, which may hold what no row can, and the set of tasks that scores it."""
    several = _tasks(task["name"], task["seed"], json.dumps(task["settings"]))
    return several[task["index"]], several


@lru_cache(maxsize=64)
def _tasks(name: str, seed: int, settings: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, **json.loads(settings))


class Task(Environment):
    """One turn; its reward is what the task's own check gives for the answer, from 0 to 1.

    Args:
        extras: `task` is that of `rows`.

    Raises:
        DataError: the row has none.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        if not isinstance(extras.get("task"), dict):
            raise DataError("expected a row of reasoning_gym_tasks:rows, with a column `task`")
        self._task = extras["task"]

    def solution(self) -> str:
        return f"<answer>{made(self._task)[0]['answer']}</answer>"

    def step(self, action: str) -> Turn:
        answers, (entry, several) = _ANSWER.findall(action), made(self._task)
        score = float(several.score_answer(answers[-1].strip(), entry)) if answers else 0.0
        return Turn([], score, done=True, metrics={"answered": float(bool(answers))})
