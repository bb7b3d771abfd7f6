"""Parses requests of chat completions and completions; the other protocols rewrite theirs as chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.data.chat.messages import read_messages, read_tools
from hpcrl.errors import DataError
from hpcrl.rollout.endpoint.images import image_part, refused_part
from hpcrl.runtime.http_server import BadRequest, Refused, parse_json

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SEEING = ("user", "tool")
_PARTS = ("text", "image_url")
_TEXTS = ("name", "tool_call_id", "reasoning_content")
_MOST_STOPS, _LONGEST_STOP = 64, 1000  # characters
_MOST_MARKS = 1_000_000  # json.loads holds Python's lock, for 2 s where 15 MiB are empty lists, and no other sample is answered meanwhile

MOST_OPEN = 32
"""Answers of a session that are generated at a time, each choice counted; further requests wait."""


class Declined(Refused):
    """A valid request that is not answered.

    Args:
        code: as OpenAI's clients look at it.
        retry: seconds after which it may be sent again; None: never.
    """

    def __init__(self, status: int, code: str, reason: str, retry: int | None = None) -> None:
        super().__init__(status, reason)
        self.code, self.retry = code, retry


def session_over() -> Declined:
    return Declined(429, "session_over", "the run wants no more of this sample", retry=30)


def session_ended() -> Declined:
    return Declined(401, "session_ended", "the sample of this key is over: it was scored, has failed, or took too long")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A completion request and its limits.

    Attributes:
        messages: of a chat, as a chat template takes them; None: a text is completed.
        prompt: that text, or its token ids.
        max_tokens: None: as many as the run lets a turn have.
        stop: further texts that end a response, which does not show them.
        stream: whether the answer is sent as events; usage is one of them if `usage`.
        logprobs: whether the answers have log-probabilities.
        size: of the body in bytes, at least as many as its texts have characters.
        previous: name of an answer of the session whose conversation comes before the messages.
        instructions: number of first messages that later answers with `previous` do not have before them.
        repeated: fields of the body that the response repeats.
    """

    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] = ""
    tools: list[dict[str, Any]]
    n: int
    max_tokens: int | None
    stop: list[str]
    stream: bool
    usage: bool
    logprobs: bool
    size: int
    previous: str | None = None
    instructions: int = 0
    repeated: Mapping[str, Any] = field(default_factory=dict)


def chat_request(content: bytes) -> Request:
    """Parse a body of /v1/chat/completions. Raises BadRequest where it is not as expected."""
    return parsed_chat(read_object(content), len(content))


def parsed_chat(body: Mapping[str, Any], size: int, **more: Any) -> Request:
    """Return the request of a parsed body of /v1/chat/completions; errors as of `chat_request`.

    Args:
        size: of the body in bytes.
        more: fields of the request that chat completions do not have.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: expected a list of chat messages")
    if body.get("top_logprobs"):
        raise BadRequest("top_logprobs: only the tokens that were chosen have log-probabilities here")
    try:
        tools, messages = read_tools(body.get("tools")), [_message(message) for message in messages]
    except DataError as error:
        raise BadRequest(f"messages: {error}") from error
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequest('tool_choice: expected "auto" or "none"; the policy decides')
    if body.get("response_format") not in (None, {"type": "text"}):
        raise BadRequest("response_format: only text")
    tokens = body.get("max_completion_tokens")
    return Request(
        messages=messages,
        tools=[] if body.get("tool_choice") == "none" else tools,
        logprobs=bool(body.get("logprobs")),
        size=size,
        **_common(body, body.get("max_tokens") if tokens is None else tokens),
        **more,
    )


def completion_request(content: bytes) -> Request:
    """Parse a body of /v1/completions; as `chat_request`."""
    body = read_object(content)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and prompt and all(_is_number(one) for one in prompt)
    if not prompt or not (isinstance(prompt, str) or tokens):
        raise BadRequest("prompt: expected one text, or a list of token ids")
    if body.get("echo") or body.get("suffix"):
        raise BadRequest("echo and suffix are not supported")
    if body.get("logprobs") not in (None, 0, 1):
        raise BadRequest("logprobs: only the tokens that were chosen have log-probabilities here; expected 0 or 1")
    logprobs = body.get("logprobs") is not None
    common = _common(body, body.get("max_tokens"))
    return Request(prompt=prompt, tools=[], logprobs=logprobs, size=len(content), **common)


def _common(body: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    n, stop = body.get("n") or 1, body.get("stop") or []
    if not _is_number(n) or not 1 <= n <= MOST_OPEN:
        raise BadRequest(f"n: expected 1 to {MOST_OPEN}")
    if tokens is not None and (not _is_number(tokens) or tokens < 1):
        raise BadRequest("max_tokens: expected a number of at least 1")
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise BadRequest("stop: expected texts")
    if len(stop) > _MOST_STOPS or any(len(one) > _LONGEST_STOP for one in stop):
        raise BadRequest(f"stop: expected at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters")
    if not isinstance(body.get("model"), str):
        raise BadRequest("model: expected a name")
    options = body.get("stream_options") or {}
    return {
        "model": body["model"],
        "n": n,
        "max_tokens": tokens,
        "stop": stop,
        "stream": bool(body.get("stream")),
        "usage": isinstance(options, dict) and bool(options.get("include_usage")),
    }


def read_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises BadRequest where there is none, or it has too many parts."""
    if sum(map(content.count, b'[{,"')) > _MOST_MARKS:
        raise BadRequest(f"expected at most {_MOST_MARKS:,} brackets, commas and quotation marks in a body")
    body = parse_json(content)
    if not isinstance(body, dict):
        raise BadRequest("expected a JSON object")
    return body


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _message(value: Any) -> dict[str, Any]:
    """Return a message as chat templates take it, of the fields that the protocol has.

    Its content is a text, or with images a list of parts; arguments of calls are objects.
    """
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"messages: expected objects with a role, one of {', '.join(_ROLES)}")
    named = {name: value[name] for name in (*_TEXTS, "tool_calls") if value.get(name)}
    for name in _TEXTS:
        if not isinstance(named.get(name, ""), str):
            raise BadRequest(f"messages: {name} is a text")
    content = value.get("content")
    (message,) = read_messages([{**named, "role": _ROLES[role], "content": "" if content is None else content}])
    if not isinstance(message["content"], str):
        message["content"] = [_part(part) for part in message["content"]]
        if message["role"] not in _SEEING:
            raise BadRequest(f"messages: expected images in messages of {' and '.join(_SEEING)}, found one of {role}")
    thought, content = message.pop("reasoning_content", ""), message["content"]
    if thought and isinstance(content, str):  # white space beside its marks is in neither, as of `Thoughts`
        message["content"] = content.lstrip()
        message.update({"reasoning_content": thought.strip()} if thought.strip() else {})
    return message


def _part(part: Any) -> dict[str, Any]:
    """Return a part as of hpcrl/data/vision/messages.py; errors as of `image_part`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url" and isinstance(part.get("image_url"), dict):
        return image_part(part["image_url"].get("url"))
    raise refused_part("messages", _PARTS, part)
