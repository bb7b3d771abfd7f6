"""A question that the policy answers with the help of programs that it writes in Python."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.numbers import number
from hpcrl.envs.rewards.response import ground_truth, truth_of
from hpcrl.envs.rewards.tags import first_block
from hpcrl.envs.tools.python import check_sandbox, run_python

_FORM = "Run a program by <python>…</python>, or give your answer as <answer>…</answer>."


class PythonTool(Environment):
    """Solve a problem with the help of Python programs.

    Several turns. Reward 1 if what <answer> holds is the ground truth, otherwise 0.

    Two numbers are compared exactly, whatever their thousands separators and trailing zeros; other texts but for letter case and
    white space around them. Each program runs in a process of its own, so that nothing is kept from one to the next.

    Args:
        extras: `reward_spec.ground_truth` is the answer, a text or a number.

    Raises:
        ConfigError: this node cannot confine programs, and environment.skyrl_gym.python_tool.require_sandbox is set.
        DataError: the row has no ground truth.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        check_sandbox(extras["skyrl_gym"].python_tool)
        self._truth = ground_truth(truth_of(extras))
        self._answer = _comparable(self._truth)
        self._left: int = extras["max_turns"]
        self._metrics = {"programs": 0.0, "failed_programs": 0.0}

    def solution(self) -> str | None:
        return f"<answer>{self._truth}</answer>"

    def state(self) -> str | None:
        return json.dumps([self._left, self._metrics])

    def resume(self, state: str) -> None:
        self._left, self._metrics = json.loads(state)

    def step(self, action: str) -> Turn:
        self._left -= 1
        block = first_block(action, ("python", "answer"))
        if block and block[0] == "answer":
            return self._end(_comparable(block[1]) == self._answer, answered=True)
        if self._left <= 0:
            return self._end(False, answered=False)
        said = f"<output>\n{self._output(block[1])}\n</output>" if block else _FORM
        return Turn([{"role": "user", "content": said}], 0.0, done=False, metrics=dict(self._metrics))

    def _end(self, right: bool, answered: bool) -> Turn:
        return Turn([], float(right), done=True, metrics={**self._metrics, "answered": float(answered)})

    def _output(self, code: str) -> str:
        ran = run_python(textwrap.dedent(code))
        self._metrics["programs"] += 1
        self._metrics["failed_programs"] += ran.failed
        lines = [ran.output.rstrip("\n"), f"(ended: {ran.ended})" if ran.ended else ""]
        return "\n".join(line for line in lines if line) or "(no output)"


def _comparable(answer: str) -> Decimal | str:
    text = answer.strip()
    found = number(text)
    return text.lower() if found is None else found
