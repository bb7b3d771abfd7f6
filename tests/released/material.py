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


@dataclass(frozen=True)
class Case:
    """A tokenizer with a chat template; what the template wants was read from it by hand.

    Attributes:
        tokenizer: its folder.
        end: the token that ends an answer.
        template: a file of FOLDER/templates, or one beside these tests; None: the tokenizer has one.
        model_type: of a config.json beside the tokenizer.
        past_end: the token that ends an answer of the past; None: the same one.
        call_end: the token that ends a message with a tool call; None: the same one.
        calls_as_text: whether arguments of tool calls are to be texts, and the content beside them null.
    """

    tokenizer: str
    end: str
    template: str | None = None
    model_type: str | None = None
    past_end: str | None = None
    call_end: str | None = None
    calls_as_text: bool = False


_DEEPSEEK = "<｜end▁of▁sentence｜>"
CASES = {
    "deepseek_v3": Case("deepseek_v3", _DEEPSEEK, calls_as_text=True),
    "deepseek_v3@llama": Case("deepseek_v3", _DEEPSEEK, model_type="llama", calls_as_text=True),
    "deepseek_v3@qwen3": Case("deepseek_v3", _DEEPSEEK, model_type="qwen3", calls_as_text=True),
    "deepseek_v3_1": Case("deepseek_v3", _DEEPSEEK, "deepseek-ai-DeepSeek-V3.1.jinja"),
    "gemma3": Case("gemma3", "<end_of_turn>"),
    "gptoss": Case("gptoss", "<|return|>", "openai-gpt-oss-120b.jinja", past_end="<|end|>", call_end="<|call|>"),
    "llama2": Case("llama2", "</s>", "llama2.jinja"),
    "llama3": Case("llama3", "<|eot_id|>"),
    "llama3_1": Case("llama3_1", "<|eot_id|>"),
    "llama3_2": Case("llama3_2", "<|eot_id|>"),
    "mistral_nemo": Case("mistral_nemo", "</s>"),
    "qwen2_5": Case("qwen2_5", "<|im_end|>"),
    "qwen3": Case("qwen3", "<|im_end|>"),
    "smollm2": Case("smollm2", "<|im_end|>"),
}
"""Behind @ stands a model_type that R1-Distill-Llama and R1-0528-Qwen3-8B have."""

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


def _call(number: int, **arguments: int) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def _result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "content": content, "tool_call_id": f"abcdefgh{number}"}


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
            assistant("", tool_calls=[_call(1, a=17, b=25)]),
            _result(1, "42"),
            assistant("It is 42."),
        ],
        tools=[_ADD],
        shown=('"a": 17', '"b": 25'),
    ),
    "parallel calls": Shape(
        [
            user("What is 17 + 25, and 8 + 91?"),
            assistant("", tool_calls=[_call(1, a=17, b=25), _call(2, a=8, b=91)]),
            _result(1, "42"),
            _result(2, "99"),
            assistant("42 and 99."),
        ],
        tools=[_ADD],
        shown=('"a": 17', '"b": 25', '"a": 8', '"b": 91'),
    ),
    "calls in turns": Shape(
        [
            user("What is 17 + 25?"),
            assistant("", tool_calls=[_call(1, a=17, b=25)]),
            _result(1, "42"),
            assistant("It is 42."),
            user("And 8 + 91?"),
            assistant("", tool_calls=[_call(2, a=8, b=91)]),
            _result(2, "99"),
            assistant("It is 99."),
        ],
        tools=[_ADD],
        shown=('"a": 17', '"b": 25', '"a": 8', '"b": 91'),
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


def folder_of(case: Case, place: Path) -> Path:
    """Return the folder of a tokenizer; that of one with a config.json is made in `place`."""
    found = SMOLLM2 if case.tokenizer == "smollm2" else FOLDER / case.tokenizer
    if not case.model_type:
        return found
    made = place / f"{case.tokenizer}-{case.model_type}"
    made.mkdir()
    for file in found.iterdir():
        (made / file.name).symlink_to(file)
    (made / "config.json").write_text(json.dumps({"model_type": case.model_type}))
    return made


def template_file(case: Case) -> Path | None:
    """Return the chat template of a case; None: its tokenizer has one."""
    if case.template is None:
        return None
    own = TEMPLATES / case.template
    return own if own.exists() else FOLDER / "templates" / case.template
