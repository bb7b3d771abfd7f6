"""The released tokenizers, and the conversations that are tried on each."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.paths import CONFIGS, ROOT

FOLDER = Path(os.environ.get("HPCRL_RELEASED", ROOT / ".released"))
"""What tests/released/install.py has made."""

SMOLLM2 = CONFIGS / "recipes" / "smollm2" / "model"
TEMPLATES = Path(__file__).with_name("templates")

ENDS = {
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>",
    "llama2": "</s>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "smollm2": "<|im_end|>",
}
"""The token that ends an answer in each chat template, read from the templates by hand."""

CASES = [*ENDS, "deepseek_v3@llama", "deepseek_v3@qwen3"]
"""Tokenizers; behind @ the model_type of a config.json beside it, as in R1-Distill-Llama and R1-0528-Qwen3-8B."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A conversation.

    Attributes:
        shown: texts of the assistant that a template has to write for the conversation to be trained whole.
    """

    messages: Messages
    tools: Messages = field(default_factory=list)
    shown: tuple[str, ...] = ()


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


_ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
_CODE = (
    "```python\ndef f(x):\n\tif x < 0:\n\t\treturn -x\n\n\n    return {'a': [x], \"b\": None}  # {{ x }} {% raw %}\n```"
)
_UNICODE = "Größe naïve e\u0301 日本語テキスト русский שלום 👩‍👩‍👧 🏳️‍🌈 \u00a0\u2028 ∑∞ ﬁ"

SHAPES = {
    "one": Shape([user("What is 2 + 2?"), assistant("It is 4.")]),
    "several": Shape(
        [
            user("What is 2 + 2?"),
            assistant("4"),
            user("And what's 3 + 3?"),
            assistant("6, isn't it?"),
            user("Thanks!"),
            assistant("You're welcome."),
        ]
    ),
    "system": Shape([{"role": "system", "content": "Be brief."}, user("Who wrote Emma?"), assistant("Jane Austen.")]),
    "tools": Shape(
        [
            user("What is 17 + 25?"),
            assistant("", tool_calls=[_CALL]),
            {"role": "tool", "content": "42"},
            assistant("It is 42."),
        ],
        tools=[_ADD],
        shown=("add", "17", "25"),
    ),
    "thoughts": Shape(
        [
            user("Is 91 prime?"),
            assistant("<think>\n7 * 13 = 91\n</think>\n\nNo."),
            user("And 97?"),
            assistant("<think>\nNeither 2, 3, 5 nor 7 divides it.\n</think>\n\nYes."),
        ],
        shown=("7 * 13 = 91", "Neither 2, 3, 5 nor 7 divides it."),
    ),
    "unicode": Shape([user(f"Repeat: {_UNICODE}"), assistant(_UNICODE)]),
    "code": Shape([user(f"Explain\n{_CODE}"), assistant(f"It is\n{_CODE}"), user("Again"), assistant(_CODE)]),
    "spaces": Shape(
        [
            user("  two before, a tab behind\t"),
            assistant(" one before, two behind  "),
            user("\nline\n"),
            assistant("a  b "),
        ]
    ),
    "lines": Shape([user("A poem?"), assistant("\n\nRoses\n\n\nViolets\n")]),
}


def folder_of(case: str, place: Path) -> Path:
    """Return the folder of a tokenizer; that of one with a config.json is made in `place`."""
    name, _, model_type = case.partition("@")
    found = SMOLLM2 if name == "smollm2" else FOLDER / name
    if not model_type:
        return found
    made = place / case
    made.mkdir()
    for file in found.iterdir():
        (made / file.name).symlink_to(file)
    (made / "config.json").write_text(json.dumps({"model_type": model_type}))
    return made


def template_file(case: str) -> Path | None:
    """Return the chat template of a tokenizer that has none; None: it has one."""
    file = TEMPLATES / f"{case.partition('@')[0]}.jinja"
    return file if file.exists() else None
