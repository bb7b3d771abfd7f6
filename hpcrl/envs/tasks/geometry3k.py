"""A problem about a figure, in the form of SkyRL's example geometry3k: a tool checks answers before the policy gives its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.answers import after_thought, last_box
from hpcrl.envs.rewards.boxed import boxed_math
from hpcrl.envs.rewards.response import Response, truth_of
from hpcrl.envs.rewards.weighted import GROUND_TRUTHS, solution

WRONG = "calc_score: 0.0. This answer is wrong; think again. Give your last answer in \\boxed{}, without a call."
NO_ANSWER = 'calc_score: a call needs {"name": "calc_score", "arguments": {"answer": "…"}}.'

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_LONGEST_CALL = 2000  # characters of JSON, which bounds its depth
_SETTINGS = EnvironmentConfig()  # the reward has none


class Geometry3K(Environment):
    """Solve a problem about a figure; a tool checks answers, and the policy may try again.

    Several turns. A text with <tool_call>{"name": "calc_score", "arguments": {"answer": "…"}}</tool_call> checks the answer of its last
    call: a right one ends the sample with reward 1, a message follows any other. A text without a call that can be read is the
    answer and ends the sample. Reward 1 if what its last \\boxed{…} holds, or else its last line, is right, otherwise 0. Answers are
    compared as the reward `boxed_math` does. generator.max_turns bounds the turns.

    Args:
        extras: `reward_spec.ground_truth`, a number or formula.

    Raises:
        DataError: the row has no ground truth.
        UserCodeError: nothing can be made of the ground truth.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._truth = truth_of(extras)
        GROUND_TRUTHS["boxed_math"](self._truth)
        self._calls = 0

    def solution(self) -> str | None:
        return solution("boxed_math", self._truth)

    def step(self, action: str) -> Turn:
        text = after_thought(action)
        calls = _CALL.findall(text)
        call = _read(calls[-1]) if calls else None
        if call is None:
            lines = text.strip().splitlines() or [""]
            right = self._is_right(last_box(text) or lines[-1])
            return Turn([], right, done=True, metrics={"right": right, "calls": self._calls})
        self._calls += 1
        answer = _answer_of(call)
        right = self._is_right(answer) if answer else 0.0
        metrics = {"right": right, "calls": self._calls}
        if right:
            return Turn([], right, done=True, metrics=metrics)
        return Turn([{"role": "user", "content": WRONG if answer else NO_ANSWER}], 0.0, done=False, metrics=metrics)

    def _is_right(self, answer: str) -> float:
        box = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
        return boxed_math(Response(text=box, ground_truth=self._truth), _SETTINGS)


def _read(call: str) -> dict[str, Any] | None:
    """Return the table of a call, of its entry `function` where it has one; None where it is not JSON."""
    try:
        found = json.loads(call) if len(call) <= _LONGEST_CALL else None
    except ValueError:
        return None
    function = found.get("function") if found else None
    return function if isinstance(function, dict) else found


def _answer_of(call: dict[str, Any]) -> str | None:
    """Return the answer that a call of the tool checks; None where it has none, or calls another tool."""
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _read(arguments)
    answer = arguments.get("answer") if call.get("name") == "calc_score" and isinstance(arguments, dict) else None
    return str(answer).strip() if answer is not None else None
