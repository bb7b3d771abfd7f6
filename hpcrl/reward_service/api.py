"""The routes of a reward service: the protocol that hpcrl/envs/rewards/remote.py describes, for texts and one reward.

    POST /enqueue   -> {uuid}; 503 where too many responses wait
    POST /fetch     -> {scores: {overall_reward: [one number per completion]}}; 425: not yet; 410: no such request, or not any more
    GET  /health    -> {status, model, reward, waiting, scored}

What a request lacks is answered with 400 and a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from hpcrl.config.sections.environment import OVERALL, REWARD_MODEL
from hpcrl.reward_service.model import Messages, RewardModel
from hpcrl.reward_service.scoring import Scoring
from hpcrl.runtime.http_server import BadRequest, Refused, Route, parse_json

_TEXT = "text"
_MOST_FIELDS = 16


@dataclass(frozen=True)
class Asked:
    """Content of an enqueue request.

    Attributes:
        messages: of each completion, the prompt.
    """

    messages: list[Messages]
    completions: list[str]


class EnqueueBody:
    """A line of JSON, which nothing follows: bytes of images or videos are for other services."""

    def parse(self, content: bytes) -> Asked:
        line, _, media = content.partition(b"\n")
        body = parse_json(line)
        if not isinstance(body, dict):
            raise BadRequest("expected a JSON object in the first line")
        if media or body.get("media_type", _TEXT) != _TEXT:
            raise BadRequest(f"expected texts (media_type {_TEXT!r}), found {body.get('media_type')!r:.40}")
        functions = body.get("reward_fn", {REWARD_MODEL: 1.0})
        if not isinstance(functions, Mapping) or not set(functions) <= {REWARD_MODEL}:
            raise BadRequest(f"reward_fn: this service has the reward {REWARD_MODEL!r} alone, found {functions!r:.80}")
        completions = body.get("completions")
        if not isinstance(completions, list) or not completions or not all(isinstance(one, str) for one in completions):
            raise BadRequest("completions: expected a list of texts")
        return Asked(_prompts(body, len(completions)), completions)


class FetchBody:
    """A form with uuid and type."""

    def parse(self, content: bytes) -> str:
        try:
            form = parse_qs(content.decode("ascii"), max_num_fields=_MOST_FIELDS)
        except ValueError as error:
            raise BadRequest(f"expected a form: {error}") from error
        if form.get("type", [REWARD_MODEL]) != [REWARD_MODEL]:
            raise BadRequest(f"type: this service has the reward {REWARD_MODEL!r} alone, found {form['type']!r:.80}")
        match form.get("uuid"):
            case [uuid]:
                return uuid
        raise BadRequest("uuid: expected the one that enqueue has answered")


class Nothing:
    """No body."""

    def parse(self, content: bytes) -> None:
        if content:
            raise BadRequest("expected no body")


class RewardApi:
    """Routes over a reward model and its queue.

    Args:
        name: what the model is called in answers.

    Attributes:
        closing: nothing new is taken.
    """

    def __init__(self, model: RewardModel, scoring: Scoring, name: str) -> None:
        self._model, self._scoring, self._name = model, scoring, name
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")  # one tokenizer is not for several threads
        self.closing = False

    def routes(self) -> dict[str, Route]:
        return {
            "/enqueue": Route(self.enqueue, EnqueueBody()),
            "/fetch": Route(self.fetch, FetchBody()),
            "/health": Route(self.health, Nothing(), "GET"),
        }

    async def enqueue(self, asked: Asked) -> dict[str, Any]:
        if self.closing:
            raise Refused(503, "this service is stopping")
        tokenize = asyncio.get_running_loop().run_in_executor
        rows = await tokenize(self._tokenizing, self._tokens, asked)
        uuid = self._scoring.submit(rows)
        if uuid is None:
            raise Refused(503, f"{self._scoring.waiting} responses wait to be scored; ask again later")
        return {"uuid": uuid}

    async def fetch(self, uuid: str) -> dict[str, Any]:
        try:
            scores = self._scoring.scores(uuid)
        except KeyError:
            raise Refused(410, f"there is no request {uuid!r:.80}, or not any more") from None
        if scores is None:
            raise Refused(425, "not scored yet")
        return {"scores": {OVERALL: scores}}

    async def health(self, _: None) -> dict[str, Any]:
        return {
            "status": "stopping" if self.closing else "serving",
            "model": self._name,
            "reward": REWARD_MODEL,
            **self.counts(),
        }

    def counts(self) -> dict[str, int]:
        return {"waiting": self._scoring.waiting, "scored": self._scoring.scored}

    def _tokens(self, asked: Asked) -> list[list[int]]:
        return [
            self._model.tokens(messages, completion)
            for messages, completion in zip(asked.messages, asked.completions, strict=True)
        ]


def _prompts(body: Mapping[str, Any], count: int) -> list[Messages]:
    messages = body.get("messages")
    if messages is None:
        prompts = body.get("prompts")
        if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts):
            raise BadRequest("expected messages, a list of chat messages for each completion, or prompts, texts")
        messages = [[{"role": "user", "content": one}] for one in prompts]
    if not isinstance(messages, list) or len(messages) != count:
        raise BadRequest(f"expected {count} prompts, one for each completion")
    if not all(isinstance(each, list) and all(map(_is_message, each)) for each in messages):
        raise BadRequest("messages: expected objects with a role and a content, both texts")
    return [[{"role": one["role"], "content": one["content"]} for one in each] for each in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
