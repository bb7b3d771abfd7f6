"""Answers of chat completions and completions, whole and as events while they are generated; models and errors of all protocols."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from hpcrl.rollout.endpoint.requests import Request
from hpcrl.rollout.endpoint.session import SessionAnswer
from hpcrl.rollout.endpoint.thoughts import Decode
from hpcrl.runtime.http_server import json_body

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}  # of other statuses: invalid_request_error


def reply(request: Request, answers: Sequence[SessionAnswer], name: str, decode: Decode) -> dict[str, Any]:
    """Return the response body of a request.

    Args:
        name: of the answer; no other has it.
        decode: token ids to text, special tokens included.
    """
    chat = request.messages is not None
    choices = [
        {
            "index": at,
            "finish_reason": _finish_reason(one),
            "logprobs": _logprobs(request, one.said.token_ids, one.said.logprobs, decode),
            **({"message": _message(one, name, at)} if chat else {"text": one.content}),
        }
        for at, one in enumerate(answers)
    ]
    kind = "chat.completion" if chat else "text_completion"
    return {**_head(request, name, kind), "choices": choices, "usage": _usage(answers)}


class Events:
    """The response as server-sent events: pieces as they come, and an end; together they equal `reply`."""

    def __init__(self, request: Request, name: str, decode: Decode) -> None:
        self._request, self._name, self._decode = request, name, decode
        self._chat = request.messages is not None
        self._head = _head(request, name, "chat.completion.chunk" if self._chat else "text_completion")
        self._told, self._offsets = Counter[int](), Counter[int]()

    def piece(
        self, _prompt: Sequence[int], number: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> bytes:
        """Return the event of a piece of a choice; empty where it has no text and no log-probabilities."""
        if not text and not self._request.logprobs:
            return b""
        told = _logprobs(self._request, token_ids, logprobs, self._decode, self._offsets[number])
        if told and not self._chat:
            self._offsets[number] += sum(map(len, told["tokens"]))
        return self._choice(number, text, told)

    def end(self, answers: Sequence[SessionAnswer]) -> Iterator[bytes]:
        """Return the events of the remaining text of whole responses."""
        for number, one in enumerate(answers):
            rest, message = one.content[self._told[number] :], _message(one, self._name, number)
            calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls", []))]
            if rest or calls or number not in self._told:
                yield self._choice(number, rest, None, {"tool_calls": calls} if calls else {})
            nothing: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            yield self._event([{"index": number, **nothing, "logprobs": None, "finish_reason": _finish_reason(one)}])
        if self._request.usage:
            yield self._event([], usage=_usage(answers))
        yield b"data: [DONE]\n\n"

    def _choice(self, number: int, text: str, logprobs: Any, more: dict[str, Any] | None = None) -> bytes:
        role = {} if number in self._told else {"role": "assistant"}
        self._told[number] += len(text)
        said = {"delta": {**role, "content": text, **(more or {})}} if self._chat else {"text": text}
        return self._event([{"index": number, **said, "logprobs": logprobs, "finish_reason": None}])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "choices": choices, **more})


def models(name: str) -> dict[str, Any]:
    """Return the list of models, as the clients of OpenAI and of Anthropic read it."""
    return {"object": "list", "data": [described(name)], "has_more": False, "first_id": name, "last_id": name}


def described(name: str) -> dict[str, Any]:
    of_anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "hpcrl", **of_anthropic}


def error(status: int, code: str | None, message: str) -> dict[str, Any]:
    """Return the body of a refusal, as the clients of OpenAI and of Anthropic read it."""
    kind = _ERRORS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "param": None, "code": code}}


def event(content: Mapping[str, Any], kind: str = "") -> bytes:
    """Return a server-sent event, with its kind where the protocol names it."""
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + json_body(content) + b"\n\n"


def arguments_of(call: Mapping[str, Any]) -> str:
    return json.dumps(call["arguments"])


def _head(request: Request, name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model}


def _finish_reason(answer: SessionAnswer) -> str:
    if answer.said.stop_reason == "length":
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _message(answer: SessionAnswer, name: str, at: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{name}_{at}_{place}",
            "type": "function",
            "function": {"name": call["name"], "arguments": arguments_of(call)},
        }
        for place, call in enumerate(answer.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    return {**message, "tool_calls": calls} if calls else message


def _logprobs(
    request: Request, token_ids: Sequence[int], logprobs: Sequence[float], decode: Decode, offset: int = 0
) -> dict[str, Any] | None:
    """Return the log-probabilities of tokens in OpenAI's format; None if they were not requested.

    Args:
        offset: of the first of them in the text, in characters.
    """
    if not request.logprobs:
        return None
    texts = [decode([token_id]) for token_id in token_ids]
    if request.messages is not None:
        tokens = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": tokens, "refusal": None}
    offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
    return {"tokens": texts, "token_logprobs": list(logprobs), "text_offset": offsets, "top_logprobs": None}


def _usage(answers: Sequence[SessionAnswer]) -> dict[str, Any]:
    prompt, said = len(answers[0].prompt), sum(len(one.said.token_ids) for one in answers)
    details = {"reasoning_tokens": sum(one.thought_tokens for one in answers)}
    counts = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    return {**counts, "completion_tokens_details": details}
