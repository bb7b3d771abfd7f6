"""OpenAI's responses: requests are rewritten as chat completions, and answers are items."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcrl.rollout.endpoint.block_events import Block, BlockEvents
from hpcrl.rollout.endpoint.images import refused_part
from hpcrl.rollout.endpoint.replies import arguments_of, event
from hpcrl.rollout.endpoint.requests import Request, parsed_chat, read_object
from hpcrl.rollout.endpoint.session import SessionAnswer
from hpcrl.rollout.endpoint.thoughts import Decode
from hpcrl.runtime.http_server import BadRequest

_NOT_TAKEN = ("background", "conversation", "prompt")
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2}  # items of one answer, in their order
_TEXTS = ("input_text", "output_text", "text")
_REPEATED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "tools")


def responses_request(content: bytes) -> Request:
    """Parse a body of /v1/responses. Raises BadRequest where it is not as expected."""
    body = read_object(content)
    for name in _NOT_TAKEN:
        if body.get(name):
            raise BadRequest(f"{name} is not supported")
    if isinstance(body.get("include"), list) and "message.output_text.logprobs" in body["include"]:
        raise BadRequest("include: responses have no log-probabilities here; chat completions have")
    given, instructions, previous = body.get("input"), body.get("instructions"), body.get("previous_response_id")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    tools, text = body.get("tools") or [], body.get("text")
    if not isinstance(items, list) or not isinstance(tools, list):
        raise BadRequest("input: expected a text or a list of items; tools: expected a list")
    if previous is not None and not isinstance(previous, str):
        raise BadRequest("previous_response_id: expected a text")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat = {
        "model": body.get("model"),
        "messages": [*system, *_chat_messages(items)],
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": body.get("tool_choice"),
        "response_format": text.get("format") if isinstance(text, dict) else None,
        "top_logprobs": body.get("top_logprobs"),
        "max_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
    }
    repeated = {name: body[name] for name in _REPEATED if body.get(name) is not None}
    return parsed_chat(chat, len(content), previous=previous, instructions=len(system), repeated=repeated)


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as chat completions have it."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise BadRequest(f"tools: expected tools of the type function with a name, found {tool!r:.80}")
    shown = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": shown}


def _chat_messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return items as messages of chat completions; reasoning, text and calls of one answer are one message."""
    chat, rank = list[dict[str, Any]](), -1
    for item in items:
        kind = str(item.get("type", "message")) if isinstance(item, dict) else ""
        if kind == "function_call_output":
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            chat.append(output)
        elif kind == "message" and item.get("role") != "assistant":
            chat.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind in _RANKS:
            if rank < 0 or _RANKS[kind] < rank + (kind != "function_call"):  # only of calls an answer has several
                chat.append({"role": "assistant", "content": "", "tool_calls": []})
            _add(chat[-1], kind, item)
            rank = _RANKS[kind]
            continue
        else:
            known = ", ".join([*_RANKS, "function_call_output"])
            raise BadRequest(f"input: expected items of the types {known}, found {item!r:.80}")
        rank = -1
    return chat


def _add(message: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    """Add an item of an answer to its message."""
    if kind == "message":
        message["content"] = _content(item.get("content"))
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or {}}
        message["tool_calls"].append({"id": item.get("call_id"), "function": function})
    else:
        parts = item.get("content") or item.get("summary") or []
        given = parts if isinstance(parts, list) else [None]
        texts = [part.get("text") if isinstance(part, dict) else None for part in given]
        if not all(isinstance(text, str) for text in texts):
            raise BadRequest("input: parts of a reasoning item have a text")
        message["reasoning_content"] = "".join(map(str, texts))


def _content(content: Any) -> Any:
    """Return texts and images as parts of chat completions."""
    if not isinstance(content, list):
        return content
    return [_part(part) for part in content]


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    raise refused_part("input", (*_TEXTS, "input_image"), part)


def response_reply(request: Request, answers: Sequence[SessionAnswer], name: str, _decode: Decode) -> dict[str, Any]:
    """Return the response body of /v1/responses; arguments as of `replies.reply`."""
    (answer,) = answers
    items = [_reasoning(name, answer.thought)] if answer.thought else []
    if answer.shown or not (answer.thought or answer.calls):
        items.append(_message(name, answer.shown))
    items += [_call(answer, name, place) for place in range(len(answer.calls))]
    whole, said = answer.said.stop_reason != "length", len(answer.said.token_ids)
    prompt = len(answer.prompt)
    return {
        **_head(request, name),
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": items,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
            "total_tokens": prompt + said,
        },
    }


class ResponseEvents(BlockEvents):
    """The response as events, of which the last one has all of it."""

    _number = _index = -1

    def _begin(self, prompt: Sequence[int]) -> Iterator[bytes]:  # noqa: ARG002
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response={**_head(self._request, self._name), "status": "in_progress"})

    def _opening(self, block: Block) -> Iterator[bytes]:
        self._index += 1
        item = _item(block, self._name, "")
        yield self._of_item("response.output_item.added", item={**item, "status": "in_progress", "content": []})
        yield self._of_part("response.content_part.added", block, part=item["content"][0])

    def _delta(self, block: Block, text: str) -> Iterator[bytes]:
        yield self._of_part(f"response.{_FIELDS[block]}.delta", block, delta=text, **_LOGPROBS[block])

    def _closing(self, block: Block, text: str) -> Iterator[bytes]:
        item = _item(block, self._name, text)
        yield self._of_part(f"response.{_FIELDS[block]}.done", block, text=text, **_LOGPROBS[block])
        yield self._of_part("response.content_part.done", block, part=item["content"][0])
        yield self._of_item("response.output_item.done", item=item)

    def _call(self, answer: SessionAnswer, place: int) -> Iterator[bytes]:
        self._index += 1
        item = _call(answer, self._name, place)
        named, arguments = {"item_id": item["id"]}, item["arguments"]
        yield self._of_item("response.output_item.added", item={**item, "status": "in_progress", "arguments": ""})
        yield self._of_item("response.function_call_arguments.delta", **named, delta=arguments)
        yield self._of_item("response.function_call_arguments.done", **named, arguments=arguments, name=item["name"])
        yield self._of_item("response.output_item.done", item=item)

    def _finish(self, answer: SessionAnswer) -> Iterator[bytes]:
        response = response_reply(self._request, [answer], self._name, self._decode)
        yield self._event(f"response.{response['status']}", response=response)

    def _of_part(self, kind: str, block: Block, **fields: Any) -> bytes:
        return self._of_item(kind, item_id=_item(block, self._name, "")["id"], content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)


_FIELDS: dict[Block, str] = {"thought": "reasoning_text", "text": "output_text"}
_LOGPROBS: dict[Block, dict[str, Any]] = {"thought": {}, "text": {"logprobs": []}}


def _head(request: Request, name: str) -> dict[str, Any]:
    tools = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    head = {"id": name, "object": "response", "created_at": int(time.time()), "model": request.model, "error": None}
    empty = {"instructions": None, "incomplete_details": None, "metadata": {}, "output": [], "usage": None}
    return {**head, **empty, **tools, "text": {"format": {"type": "text"}}, **request.repeated}


def _item(block: Block, name: str, text: str) -> dict[str, Any]:
    return _reasoning(name, text) if block == "thought" else _message(name, text)


def _reasoning(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content, "status": "completed"}


def _message(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    head = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
    return {**head, "content": content, "status": "completed"}


def _call(answer: SessionAnswer, name: str, place: int) -> dict[str, Any]:
    call, named = answer.calls[place], f"{name}_{place}"
    said = {"name": call["name"], "arguments": arguments_of(call), "status": "completed"}
    return {"type": "function_call", "id": f"fc_{named}", "call_id": f"call_{named}", **said}
