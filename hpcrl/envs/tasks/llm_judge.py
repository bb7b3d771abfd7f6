"""Responses that a language model grades, behind any server with OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Environment, Messages, Turn
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.rubric import Graded, grade_of, rubric_or_truth
from hpcrl.envs.tools.judge import JudgeModel, as_text

_NAME = "llm_as_a_judge"


class LLMJudge(Environment):
    """Be graded from 0 to 1 by a language model.

    One turn; the grade is the reward, as of `rubric_judge`. The judge sees the conversation, the response and what to grade it by.

    Args:
        extras: `rubric`, or `reward_spec.ground_truth`, as of `rubric_judge`.
            `environment.custom.judge_parameters` takes the place of {"temperature": 0} in the request.

    Raises:
        ConfigError: no model is named.
        DataError: as of `rubric_of`.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        custom: Mapping[str, Any] = extras.get("custom") or {}
        self._judge = JudgeModel(_NAME, extras["skyrl_gym"].llm_as_a_judge, custom)
        self._rubric = rubric_or_truth(_NAME, extras, custom, truth_of(extras))
        self._conversation = ""

    def init(self, messages: Messages) -> Messages:
        self._conversation = as_text(messages)
        return messages

    def step(self, action: str) -> Turn:
        """Return the grade; errors as of `JudgeModel.ask`."""
        return Turn([], grade_of(self._judge, Graded(self._rubric, self._conversation, action)), done=True)
