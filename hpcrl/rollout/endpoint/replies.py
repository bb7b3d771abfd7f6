"""Answers in OpenAI's protocol, whole and as events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcrl.rollout.endpoint.requests import Request
from hpcrl.rollout.endpoint.session import Answer
from hpcrl.runtime.http_server import json_body

Decode = Callable[[list[int]], str]


def reply(request: Request, answers: Sequence[Answer], name: str, decode: Decode) -> dict[str, Any]:
    """Return the answer to a request.

    Args:
        name: of the answer; no other has it.
        decode: token ids to text, special tokens included.
    """
    chat = request.messages is not None
    choices = [
        {
            "index": at,
            "finish_reason": _finish_reason(one),
            "logprobs": _logprobs(one, chat, decode) if request.logprobs else None,
            **({"message": _message(one, name, at)} if chat else {"text": one.text}),
        }
        for at, one in enumerate(answers)
    ]
    kind = "chat.completion" if chat else "text_completion"
    return {**_head(request, name, kind), "choices": choices, "usage": _usage(answers)}


def events(request: Request, answers: Sequence[Answer], name: str, decode: Decode) -> Iterator[bytes]:
    """Return the same as server-sent events; each choice comes whole, as engines tell of it when it has ended."""
    whole = reply(request, answers, name, decode)
    chat = request.messages is not None
    head = _head(request, name, "chat.completion.chunk" if chat else "text_completion")
    for choice in whole["choices"]:
        reason = choice.pop("finish_reason")
        if chat:
            delta = choice.pop("message")
            for at, call in enumerate(delta.get("tool_calls") or []):
                call["index"] = at
            yield _event({**head, "choices": [{**choice, "delta": delta, "finish_reason": None}]})
            choice = {"index": choice["index"], "delta": {}}
        else:
            yield _event({**head, "choices": [{**choice, "finish_reason": None}]})
            choice = {"index": choice["index"], "text": ""}
        yield _event({**head, "choices": [{**choice, "finish_reason": reason}]})
    if request.usage:
        yield _event({**head, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "hpcrl"}]}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json_body(content) + b"\n\n"


def _head(request: Request, name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model}


def _finish_reason(answer: Answer) -> str:
    if answer.said.stop_reason == "length":
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _message(answer: Answer, name: str, at: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{name}_{at}_{place}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for place, call in enumerate(answer.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    return {**message, "tool_calls": calls} if calls else message


def _logprobs(answer: Answer, chat: bool, decode: Decode) -> dict[str, Any]:
    texts = [decode([token_id]) for token_id in answer.said.token_ids]
    if chat:
        tokens = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, answer.said.logprobs, strict=True)
        ]
        return {"content": tokens, "refusal": None}
    offsets = [sum(map(len, texts[:at])) for at in range(len(texts))]
    return {"tokens": texts, "token_logprobs": answer.said.logprobs, "text_offset": offsets, "top_logprobs": None}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt, said = len(answers[0].prompt), sum(len(one.said.token_ids) for one in answers)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
