"""A language model that judges responses, behind any server with OpenAI's chat completions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

from hpcrl.config.sections.environment import LLMJudgeConfig
from hpcrl.envs.base import GIVEN_UP, Messages
from hpcrl.envs.tools.columns import lacking
from hpcrl.envs.tools.http import ToolService
from hpcrl.errors import ConfigError, ServiceError
from hpcrl.text import said_in

S = TypeVar("S")
T = TypeVar("T")

_OPENAI = "https://api.openai.com/v1"
TIMEOUT_S, PATIENCE_S = 120.0, 120.0
_AT_ONCE = 8
_MOST_POINTS = 1e6  # of a criterion, so that sums of weights stay finite


class NoVerdict(ServiceError):
    """A judge has answered, and its answer has no verdict."""


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
            ServiceError: the judge does not answer; NoVerdict: its answer has none, or was cut off.
        """
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": question}]
        service = self._service()
        answer = service.post(json={**self._request, "messages": messages})
        text, cut = _text_of(answer)
        if cut:
            whole = "a whole answer (raise max_tokens in environment.custom.judge_parameters, or leave it out)"
            raise NoVerdict(str(service.unusable(whole, f"one that was cut off: …{text[-200:]}")))
        if (found := read(text)) is None:
            shown = f"…{text[-200:]}" if len(text) > 200 else text or answer
            raise NoVerdict(str(service.unusable(expected, shown)))
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
        return ToolService(name, url, TIMEOUT_S, PATIENCE_S, key, GIVEN_UP.get())


def at_once(ask: Callable[[S], T], each: Iterable[S]) -> list[T | NoVerdict]:
    """Return what the judge answers about each of several things, of which at most 8 are asked at once; the error where an answer has no verdict.

    Further errors are those of `ask`. After one, as after an interrupt, or once the call of the reward has been given up, no request begins.
    """
    given_up, over = GIVEN_UP.get(), Event()

    def asked(one: S) -> T | NoVerdict:
        try:
            return ask(one)
        except NoVerdict as error:
            return error

    def unwanted() -> bool:
        return over.is_set() or given_up()

    with ThreadPoolExecutor(_AT_ONCE, initializer=GIVEN_UP.set, initargs=(unwanted,)) as threads:
        try:
            return list(threads.map(asked, each))
        finally:
            over.set()


@dataclass(frozen=True)
class Criterion:
    """What an answer is graded by: a text, and the points of an answer that it fits; below 0 they are taken away."""

    text: str
    weight: float = 1.0


def rubric_of(user: str, extras: Mapping[str, Any], custom: Mapping[str, Any]) -> str | list[Criterion]:
    """Return the rubric of a row, or else of environment.custom, a text or criteria; an empty text: neither has one.

    Args:
        user: as of `JudgeModel`.

    Raises:
        DataError: the rubric is neither a text nor a list of criteria of which one has a positive weight.
    """
    rubric = extras.get("rubric") or custom.get("rubric") or ""
    if isinstance(rubric, str):
        return rubric
    found = [_criterion(each) for each in rubric] if isinstance(rubric, list) else []
    criteria = [each for each in found if each]
    if len(criteria) < len(found) or not any(each.weight > 0 for each in criteria):
        expected = f'a text, a list of {{"criterion": text, "weight": number}} with a weight above 0, at most {_MOST_POINTS:g}, or none'
        raise lacking(user, "rubric", expected, rubric)
    return criteria


def _criterion(given: Any) -> Criterion | None:
    if not isinstance(given, Mapping):
        return None
    text, weight = given.get("criterion"), given.get("weight")
    weight = 1.0 if weight is None else weight
    fits = isinstance(text, str) and isinstance(weight, int | float) and abs(weight) <= _MOST_POINTS
    return Criterion(text, float(weight)) if fits and text else None


def weighted(grades: Sequence[float], criteria: Sequence[Criterion]) -> float:
    """Return the points of an answer by those that are possible, from 0 to 1 (HealthBench, arXiv:2505.08775).

    Args:
        grades: how far it fits each of the criteria, from 0 to 1.
    """
    points = math.fsum(grade * each.weight for grade, each in zip(grades, criteria, strict=True))
    return min(max(points / math.fsum(each.weight for each in criteria if each.weight > 0), 0.0), 1.0)


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
