"""Anthropic's messages: requests are rewritten as chat completions, and answers are content blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcrl.rollout.endpoint.block_events import Block, BlockEvents
from hpcrl.rollout.endpoint.images import refused_part
from hpcrl.rollout.endpoint.replies import arguments_of, event
from hpcrl.rollout.endpoint.requests import Request, parsed_chat, read_object
from hpcrl.rollout.endpoint.session import SessionAnswer
from hpcrl.rollout.endpoint.thoughts import Decode
from hpcrl.runtime.http_server import BadRequest

_Message = dict[str, Any]


def messages_request(content: bytes) -> Request:
    """Parse a body of /v1/messages or /v1/messages/count_tokens. Raises BadRequest where it is not as expected."""
    body = read_object(content)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: expected a list of messages")
    if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        raise BadRequest("messages: the last one is the assistant's, and the policy begins its answers itself")
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools: expected a list of objects")
    chat = {
        "model": body.get("model"),
        "messages": [*_plain_parts(system), *(chat for message in messages for chat in _chat_messages(message))],
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": choice.get("type") if isinstance(choice, dict) else choice,
        "response_format": _format_of(body.get("output_config")),
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
        "stream": body.get("stream"),
    }
    return parsed_chat(chat, len(content))


def _format_of(config: Any) -> Any:
    return config.get("format") if isinstance(config, dict) else None


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as chat completions have it."""
    known = isinstance(tool, dict) and tool.get("type") in (None, "custom")
    if not known or not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise BadRequest(f"tools: expected a name and an input_schema, found {tool!r:.80}")
    description = {"description": tool["description"]} if tool.get("description") else {}
    return {
        "type": "function",
        "function": {"name": tool["name"], **description, "parameters": tool["input_schema"]},
    }


def _chat_messages(message: Any) -> list[_Message]:
    """Return the messages of chat completions that a message stands for: several where it has results of tools."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    for block in content:
        if not isinstance(block, dict) or block.get("type") not in _READ:
            raise refused_part("messages", _READ, block)
    if message.get("role") == "assistant":
        return [_assistant(content)]
    chat = list[_Message]()
    for block in content:
        if block["type"] == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""}
            chat += _plain_parts([result])
        elif chat and chat[-1]["role"] != "tool":
            chat[-1]["content"] += [_part(block)]
        else:
            chat.append({"role": message.get("role"), "content": [_part(block)]})
    return chat or [{"role": message.get("role"), "content": ""}]


def _assistant(content: Sequence[Mapping[str, Any]]) -> _Message:
    """Return the message of an answer; thoughts that only Anthropic can read are left out."""
    thoughts = [block.get("thinking") for block in content if block["type"] == "thinking"]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise BadRequest("messages: a thinking block has a text")
    calls = [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input") or {}}}
        for block in content
        if block["type"] == "tool_use"
    ]
    parts = [_part(block) for block in content if block["type"] not in ("thinking", "redacted_thinking", "tool_use")]
    thought = "".join(map(str, thoughts))
    return {"role": "assistant", "content": parts, "reasoning_content": thought, "tool_calls": calls}


def _plain_parts(messages: Sequence[_Message]) -> list[_Message]:
    return [
        {**one, "content": [_part(block) for block in one["content"]]} if isinstance(one["content"], list) else one
        for one in messages
    ]


def _part(block: Any) -> dict[str, Any]:
    """Return a block of text or an image as a part of chat completions."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    source = block.get("source") if kind == "image" else None
    if isinstance(source, dict):
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {
            "type": "image_url",
            "image_url": {"url": data if source.get("type") == "base64" else source.get("url")},
        }
    raise refused_part("messages", ("text", "image"), block)


_READ = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")


def message_reply(request: Request, answers: Sequence[SessionAnswer], name: str, _decode: Decode) -> dict[str, Any]:
    """Return the response body of /v1/messages; arguments as of `replies.reply`."""
    (answer,) = answers
    blocks: list[dict[str, Any]] = [_block("thought", answer.thought, name)] if answer.thought else []
    if answer.shown or not (answer.thought or answer.calls):
        blocks.append(_block("text", answer.shown, name))
    blocks += [_use(answer, name, place) for place in range(len(answer.calls))]
    usage = {**_input(answer.prompt), **_output(answer)}
    return {**_head(request, name), "content": blocks, **_stop(answer), "usage": usage}


class MessageEvents(BlockEvents):
    """The response as events, which together equal `message_reply`."""

    _index = -1

    def _begin(self, prompt: Sequence[int]) -> Iterator[bytes]:
        head = {**_head(self._request, self._name), "content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**_input(prompt), "output_tokens": 0}
        yield _event("message_start", message={**head, "usage": usage})
        yield _event("ping")

    def _opening(self, block: Block) -> Iterator[bytes]:
        yield self._start(_block(block, "", ""))

    def _delta(self, block: Block, text: str) -> Iterator[bytes]:
        field = "thinking" if block == "thought" else "text"
        yield self._of_block("content_block_delta", delta={"type": f"{field}_delta", field: text})

    def _closing(self, block: Block, text: str) -> Iterator[bytes]:  # noqa: ARG002
        if block == "thought":
            signed = {"type": "signature_delta", "signature": self._name}
            yield self._of_block("content_block_delta", delta=signed)
        yield self._of_block("content_block_stop")

    def _call(self, answer: SessionAnswer, place: int) -> Iterator[bytes]:
        yield self._start({**_use(answer, self._name, place), "input": {}})
        arguments = {"type": "input_json_delta", "partial_json": arguments_of(answer.calls[place])}
        yield self._of_block("content_block_delta", delta=arguments)
        yield self._of_block("content_block_stop")

    def _finish(self, answer: SessionAnswer) -> Iterator[bytes]:
        yield _event("message_delta", delta=_stop(answer), usage=_output(answer))
        yield _event("message_stop")

    def _start(self, content_block: dict[str, Any]) -> bytes:
        self._index += 1
        return self._of_block("content_block_start", content_block=content_block)

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, index=self._index, **fields)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _head(request: Request, name: str) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "model": request.model}


def _block(block: Block, text: str, signature: str) -> dict[str, Any]:
    if block == "thought":
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text, "citations": None}


def _use(answer: SessionAnswer, name: str, place: int) -> dict[str, Any]:
    call = answer.calls[place]
    return {"type": "tool_use", "id": f"toolu_{name}_{place}", "name": call["name"], "input": call["arguments"]}


def _input(prompt: Sequence[int]) -> dict[str, int]:
    return {"input_tokens": len(prompt), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _output(answer: SessionAnswer) -> dict[str, Any]:
    details = {"thinking_tokens": answer.thought_tokens}
    return {"output_tokens": len(answer.said.token_ids), "output_tokens_details": details}


def _stop(answer: SessionAnswer) -> dict[str, Any]:
    reason = "tool_use" if answer.calls else "stop_sequence" if answer.stopped_by else "end_turn"
    if answer.said.stop_reason == "length":
        reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}
