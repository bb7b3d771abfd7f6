"""guess_number by tool calls: what its start model, its rows and its service say."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.paths import CONFIGS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the number; the answer says whether it is higher, lower, or found.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
]
FOUND = "Found."
_OPEN, _CLOSE = '<tool_call>{"name": "guess", "arguments": {"number": ', "}}</tool_call>"
_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _maker() -> Any:
    spec = importlib.util.spec_from_file_location("guess_number_make", CONFIGS / "guess_number" / "make.py")
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def calling(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which each guess is a tool call, and what is told of it the tool's result."""
    called = list[dict[str, Any]]()
    for message in conversation:
        if message["role"] == "assistant":
            function = {"name": "guess", "arguments": {"number": int(message["content"])}}
            called.append({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
        else:
            called.append({**message, "role": "tool"} if called else message)
    return called


def make(folder: Path) -> tuple[Path, Path]:
    """Write the start model, which the stubborn teacher of guess_number has taught by tool calls, and the rows; return where."""
    made, rows = _maker(), folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({**row, "env_class": "agent"}) + "\n" for row in made.all_rows()))
    phrases = (*made.PHRASES, "guess", _OPEN, _CLOSE, FOUND)
    taught = [calling(conversation) for conversation in made.conversations()]
    return make_model(folder / "model", phrases, taught, TOOLS), rows


def make_model(folder: Path, phrases: Sequence[str], taught: list[list[dict[str, Any]]], tools: list[Any]) -> Path:
    """Write a tiny model that has been taught conversations, each phrase of which is a token; return its folder."""
    torch.manual_seed(0)
    made = _maker()
    tokenizer = made.quickstart["make_tokenizer"]("0123456789", phrases)
    tokenizer.chat_template = _TEMPLATE
    model = made.quickstart["make_model"](tokenizer)
    made.learn(model, *made.encode(tokenizer, taught, tools=tools))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
