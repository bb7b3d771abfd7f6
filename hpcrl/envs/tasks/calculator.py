"""A tool over several turns: the policy calls a calculator, sees what it returns, and answers."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.numbers import expected_number
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.tasks.arithmetic import answered
from hpcrl.envs.terminal.calls import CallError, first_call, read_call
from hpcrl.envs.tools.expression import ExpressionError, evaluate

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an expression of numbers, + - * / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
"""What a chat template that knows tools is given, in generator.chat_template_kwargs.tools."""

_LONGEST_CALL = 500  # characters of JSON, which bounds its depth
_DIGITS = Context(prec=15)


class Calculator(Environment):
    """Solve a problem with a calculator as a tool.

    Several turns. A text with <tool_call>{"name": "calculator", "arguments": {"expression": "2 * 3"}}</tool_call> is answered by a message
    of the role `tool`. It has the value of the first call's expression to 15 digits, or what is wrong with the call. A text without a call
    is the answer and ends the sample. Reward 1 if what the first <answer>…</answer> holds, or else the whole text, is the expected number,
    otherwise 0.

    Args:
        extras: `reward_spec.ground_truth`, a number.

    Raises:
        DataError: the row has no ground truth, or it is no number.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._expected = expected_number(truth_of(extras))
        self._calls = self._failed = 0

    def solution(self) -> str | None:
        return f"<answer>{self._expected}</answer>"

    def step(self, action: str) -> Turn:
        call = first_call(action)
        if call is None:
            metrics = {"answered": 1.0, "calls": self._calls, "failed_calls": self._failed}
            return Turn([], float(answered(action, self._expected)), done=True, metrics=metrics)
        self._calls += 1
        try:
            result = _shown(evaluate(_expression_of(call)).value)
        except ExpressionError as error:
            self._failed += 1
            result = f"error: {error}"
        metrics = {"answered": 0.0, "calls": self._calls, "failed_calls": self._failed}
        return Turn([{"role": "tool", "content": result}], 0.0, done=False, metrics=metrics)


def _expression_of(call: str) -> str:
    """Return the expression that a call asks for. Raises ExpressionError where it asks for something else or cannot be read."""
    try:
        name, arguments = read_call(call, _LONGEST_CALL)
    except CallError as error:
        raise ExpressionError(str(error)) from error
    if name != TOOL["function"]["name"]:
        raise ExpressionError('expected {"name": "calculator", "arguments": {"expression": "…"}}')
    expression = arguments.get("expression")
    if not isinstance(expression, str):
        raise ExpressionError('expected "arguments": {"expression": "…"}')
    return expression


def _shown(value: Fraction) -> str:
    """Return a number as a person writes it, to 15 digits: 7.5, -24, 1234567."""
    found = _DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{found.normalize(_DIGITS):f}" if abs(found.adjusted()) < 30 else f"{found.normalize(_DIGITS)}"
