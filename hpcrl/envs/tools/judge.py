"""A language model that judges responses, behind any server with OpenAI's chat completions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hpcrl.config.sections.environment import LLMJudgeConfig
from hpcrl.envs.base import Messages
from hpcrl.envs.tools.columns import lacking
from hpcrl.envs.tools.http import ToolService
from hpcrl.errors import ConfigError
from hpcrl.text import said_in

T = TypeVar("T")

_OPENAI = "https://api.openai.com/v1"
TIMEOUT_S, PATIENCE_S = 120.0, 120.0


class JudgeModel:
    """The judge model of `environment.skyrl_gym.llm_as_a_judge`.

    Args:
        user: environment or reward that asks it, for errors.
        custom: environment.custom; its `judge_parameters` take the place of {"temperature": 0} in requests.

    Raises:
        ConfigError: no model is named.
    """

    def __init__(self, user: str, config: LLMJudgeConfig, custom: Mapping[str, Any]) -> None:
        if config.model is None:
            raise ConfigError(f"environment.skyrl_gym.llm_as_a_judge.model: required by {user}")
        self._request = {"model": config.model, **custom.get("judge_parameters", {"temperature": 0})}
        self._user, self._base_url = user, config.base_url

    def ask(self, instructions: str, question: str, read: Callable[[str], T | None], expected: str) -> T:
        """Return what `read` finds in the judge's answer.

        Args:
            instructions, question: messages of the system and of the user.
            read: returns None where an answer has no verdict.
            expected: the answer's form, for errors.

        Raises:
            ConfigError: there is no key for OpenAI's own server, or the address is none.
            ServiceError: the judge does not answer, or without a verdict.
        """
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": question}]
        service = self._service()
        answer = service.post(json={**self._request, "messages": messages})
        text, cut = _text_of(answer)
        if cut:
            whole = "a whole answer (raise max_tokens in environment.custom.judge_parameters, or leave it out)"
            raise service.unusable(whole, f"one that was cut off: …{text[-200:]}")
        if (found := read(text)) is None:
            raise service.unusable(expected, f"…{text[-200:]}" if len(text) > 200 else text or answer)
        return found

    def _service(self) -> ToolService:
        key = os.environ.get("OPENAI_API_KEY") or None
        if key is None and self._base_url is None:
            raise ConfigError(
                f"{self._user}: OPENAI_API_KEY is not set; export it where you submit, or name a server of your own in "
                "environment.skyrl_gym.llm_as_a_judge.base_url"
            )
        name = "judge (environment.skyrl_gym.llm_as_a_judge.base_url)"
        url = f"{(self._base_url or _OPENAI).rstrip('/')}/chat/completions"
        return ToolService(name, url, TIMEOUT_S, PATIENCE_S, key)


def rubric_of(user: str, extras: Mapping[str, Any], custom: Mapping[str, Any]) -> str | None:
    """Return the rubric of a row, or else that of environment.custom; None: neither has one.

    Args:
        user: as of `JudgeModel`.

    Raises:
        DataError: the rubric is no text.
    """
    rubric = extras.get("rubric") or custom.get("rubric")
    if not isinstance(rubric, str | None):
        raise lacking(user, "rubric", "a text, or none", rubric)
    return rubric


def as_text(messages: Messages) -> str:
    """Return a conversation as a judge reads it."""
    return "\n\n".join(f"{message['role']}: {said_in(message['content'] or '')}" for message in messages)


def _text_of(answer: Any) -> tuple[str, bool]:
    """Return the text of an answer, and whether it was cut off, so that its verdict may be a part of another."""
    try:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (IndexError, KeyError, TypeError, AttributeError):
        return "", False
    return (text, reason == "length") if isinstance(text, str) else ("", False)
