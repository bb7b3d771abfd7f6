"""Requests of programs that went wrong, or mean harm: fields with values of other types and sizes, odd texts, and spoilt bytes."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.rollout.material import VOCABULARY

PATHS = ("chat/completions", "completions", "messages", "responses", "messages/count_tokens")
_TEXTS = (
    "a", "", " ", "abc" * 300, "\0", "\n\r\t", "\ud800", "\udfff\ud800", "\ufeff", "\ufffd", "\uffff", "\U0010fffd", "\U0010ffff", "🙂" * 20,
    "e\u0301" * 50, "\u202e\u2066", "<|im_end|>", "<|endoftext|><s>", "<tool_call>", "{{ 7 * 7 }}", "{% for x in y %}", "é" * 1000, "x" * 1001,
)  # fmt: skip
_NUMBERS = (0, 1, 2, 3, 31, 32, 33, -1, 128, 2**31, 2**63, 2**64, 10**300, 0.5, -0.0, 1e308, float("inf"), float("nan"))
_FIELDS = (
    "model", "messages", "prompt", "tools", "tool_choice", "n", "stop", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "stream",
    "stream_options", "temperature", "top_p", "seed", "logit_bias", "response_format", "echo", "suffix", "guided_regex", "stop_token_ids",
    "prompt_logprobs", "min_tokens", "ignore_eos", "bad_words", "structured_outputs", "system", "stop_sequences", "output_config", "thinking", "input",
    "instructions", "previous_response_id", "max_output_tokens", "text", "reasoning", "include",
)  # fmt: skip
_STOPS = tuple(text for text in _TEXTS if text and not any("\ud800" <= letter <= "\udfff" for letter in text))
_URLS = (
    "data:image/png;base64,AAAA",
    "data:image/png;base64,\udfff",
    "data:,",
    "http://example.org/a.png",
    "/dev/zero",
    "",
)
_BYTES = (
    b"\xed\xa0\x80",
    b"\xff",
    b"\0",
    b"\xc3",
    b"\xf4\x90\x80\x80",
    b'"',
    b"{",
    b"]",
    b"\\u",
    b"\\ud83d",
    b"9" * 5000,
    b"1e999",
    b"NaN",
)


def odd_request(seed: str) -> tuple[str, bytes]:
    """Return the path and the body of a request; always the same for a seed."""
    chance = random.Random(seed)
    path = chance.choice(PATHS)
    body: dict[str, Any] = {"model": "policy", "max_tokens": chance.choice([1, 2, 4])}
    body |= {"prompt": _prompt(chance)} if path == "completions" else {"messages": [_user(chance)]}
    body["input"] = _odd(
        chance, [_user(chance), {"type": "reasoning", "content": []}, {"type": "function_call_output", "output": "a"}]
    )
    if path.startswith("messages") and chance.random() < 0.5:
        blocks = [
            {"type": "text", "text": chance.choice(_TEXTS)},
            {"type": "thinking", "thinking": "a"},
            {"type": "tool_result", "content": "a"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        ]
        body["messages"] = [
            {"role": chance.choice(["user", "assistant"]), "content": _odd(chance, blocks)},
            _user(chance),
        ]
    if chance.random() < 0.7:  # the texts that an engine gets as they are
        body["stop_sequences" if path.startswith("messages") else "stop"] = chance.choices(
            _STOPS, k=chance.choice([1, 1, 2, 5, 64, 65])
        )
    for _ in range(chance.choice([0, 0, 1, 1, 2, 3])):
        body[chance.choice(_FIELDS)] = _value(chance, chance.choice([0, 1, 3]))
    content = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
    what = chance.random()
    if what < 0.1:
        at = chance.randrange(len(content) + 1)
        content = content[:at] + chance.choice(_BYTES) + content[at + chance.randrange(3) :]
    elif what < 0.13:
        content = content.decode(errors="surrogatepass").encode(chance.choice(["utf-16", "utf-32-be"]), "surrogatepass")
    return path, content


def _odd(chance: random.Random, parts: list[dict[str, Any]]) -> list[Any]:
    """Return parts of which one may have another value in one of its fields."""
    part = chance.choice(parts)
    if chance.random() < 0.5:
        part[chance.choice([*part, "arguments", "id"])] = _value(chance, 1)
    return chance.sample(parts, chance.randint(1, len(parts)))


def _user(chance: random.Random) -> dict[str, Any]:
    text = chance.choice(["cab", "sort: bca", *_TEXTS])
    if chance.random() < 0.9:
        return {"role": "user", "content": text}
    image = {"type": chance.choice(["image_url", "input_image"]), "image_url": {"url": chance.choice(_URLS)}}
    return {"role": "user", "content": _odd(chance, [{"type": "text", "text": text}, image])}


def _prompt(chance: random.Random) -> Any:
    ids = [chance.randrange(VOCABULARY + (chance.random() < 0.1)) for _ in range(chance.choice([1, 3, 50, 119, 130]))]
    return chance.choice([ids, [ids], "abc", chance.choice(_TEXTS)])


def _value(chance: random.Random, depth: int) -> Any:
    kind = chance.random()
    if kind < 0.3:
        return chance.choice(_NUMBERS)
    if kind < 0.6 or not depth:
        return chance.choice([*_TEXTS, None, True, False])
    if kind < 0.65:  # json.dumps itself goes no deeper than Python's limit of recursion
        return _nested(chance.choice([60, 70, 301]))
    if kind < 0.8:
        return [_value(chance, depth - 1) for _ in range(chance.choice([0, 1, 3, 20]))]
    names = (
        *_FIELDS,
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "type",
        "text",
        "input_schema",
        "source",
        "call_id",
        "format",
    )
    return {chance.choice(names): _value(chance, depth - 1) for _ in range(chance.choice([0, 1, 3]))}


def _nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = [value] if depth % 2 else {"type": value}
    return value
