"""The form in which a chat template takes tool calls is found by trying, and is the same in training, prompts, pairs and between turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcrl.data.chat.calls import CallForm
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.chat.template import ChatTemplate
from hpcrl.data.conversations import Columns, Renderer
from hpcrl.errors import DataError
from tests.data.chat.forms import CHATML, TOOLS, made

END = "<|im_end|>"
_LOOP, _PROMPT = (
    "{% for m in messages %}",
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
# as DeepSeek's: a call is written only where the content is null, and its arguments are joined to text
AS_TEXT = (
    _LOOP + "<|im_start|>{{ m.role }}\n{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + '\n' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    + _PROMPT
)
# as Mistral's: calls and what answers them have ids of nine letters and digits
WITH_IDS = (
    _LOOP + "<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}{% if not c.id or c.id | length != 9 %}"
    "{{ raise_exception('expected ids of 9') }}{% endif %}{{ c.function | tojson }} {{ c.id }}{% endfor %}"
    "{% if m.role == 'tool' %}{% if not m.tool_call_id or m.tool_call_id | length != 9 %}{{ raise_exception('expected ids of 9') }}"
    "{% endif %}{{ m.tool_call_id }}: {% endif %}{{ m.content }}<|im_end|>\n" + _PROMPT
)
# an id has to be there, and a content not to be null
ANY_ID = WITH_IDS.replace(" or c.id | length != 9", "").replace(" or m.tool_call_id | length != 9", "")
ABSENT = TOOLS.replace("{{ m.content }}", "{% if 'content' in m %}{{ m.content }}{% set m = {} %}{% endif %}").replace(
    "{% if m.tool_calls %}", "{% if m.tool_calls and 'content' not in m %}"
)
# gpt-oss's: what a tool says follows a call alone, a call ends with a token of its own, and an answer of the past with another
CHANNELS = (
    "{% set last = namespace(name=none) %}"
    + _LOOP
    + "{% if m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}{% endif %}<|im_start|>{{ last.name }}\n{{ m.content }}"
    "<|endoftext|>{% elif m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}<|im_start|>assistant to={{ last.name }}\n"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|eot_id|>{% elif m.role == 'assistant' %}<|im_start|>assistant<think>final\n{{ m.content }}"
    "{{ '<|im_end|>' if loop.last and not add_generation_prompt else '<|endoftext|>' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
# Python writes the arguments, which no form mends
REPR = TOOLS.replace("| tojson }}</tool_call>", "}}</tool_call>")


def call(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": {"a": "x y", "b": [1, 2.5]}}, **more}


def talk(**more: Any) -> list[dict[str, Any]]:
    answering = {"tool_call_id": more["id"]} if "id" in more else {}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call(**more)]},
        {"role": "tool", "content": "42", **answering},
        {"role": "assistant", "content": "It is 42."},
    ]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TOOLS, CallForm()),
        (AS_TEXT, CallForm(as_text=True, empty="null")),
        (WITH_IDS, CallForm(ids="nine")),
        (ANY_ID, CallForm(ids="filled")),
        (ABSENT, CallForm(empty="absent")),
        (CHANNELS, CallForm()),
        (REPR, None),
        (CHATML, None),
        (TOOLS.replace("'arguments': c.function.arguments", "'arguments': c.function.arguments | tojson"), None),
    ],
)  # fmt: skip
def test_a_form_is_found_by_trying(template: str, form: CallForm | None) -> None:
    assert ChatTemplate(made("bytes", template, END), {}).calls == form


@pytest.mark.parametrize("template", [TOOLS, AS_TEXT, WITH_IDS, ANY_ID, ABSENT, CHANNELS])
@pytest.mark.parametrize("more", [{}, {"id": "call_of_the_client_1"}, {"id": "abcdefgh9"}])
def test_one_form_everywhere(template: str, more: dict[str, Any]) -> None:
    """A row, the prompt of its last answer, a pair, and what stands between two turns."""
    tokenizer, messages = made("bytes", template, END), talk(**more)
    (row,) = Renderer(tokenizer, Columns(conversation="m"), {}).sequences({"m": messages})
    text = str(tokenizer.decode(row.token_ids))
    assert json.dumps({"a": "x y", "b": [1, 2.5]}) in text
    if more and template != TOOLS and template != WITH_IDS:
        assert text.count(more["id"]) == (2 if template == ANY_ID else 0)
    turns = ChatTurns(tokenizer, {})
    ended = row.token_ids[: len(row.mask) - row.mask[::-1].index(True)]
    begin = len(ended) - row.mask[len(ended) - 1 :: -1].index(False)
    assert turns.opening(messages[:3]).token_ids == row.token_ids[:begin]
    pair = {"p": messages[:3], "chosen": "It is 42.", "rejected": "No."}
    chosen, _ = Renderer(tokenizer, Columns("preference", prompt="p"), {}).sequences(pair)
    assert chosen.token_ids == row.token_ids
    first = row.mask.index(True)
    said = row.token_ids[first : first + row.mask[first:].index(False)]
    named = messages[2] | {"name": "add"}
    assert said[-1] in turns.ends
    following = turns.between([*row.token_ids[:first], *said], [named], end=True).token_ids
    if template not in (WITH_IDS, ANY_ID) or more:  # else the policy has said an id that nobody else knows
        assert following == row.token_ids[first + len(said) : begin]


@pytest.mark.parametrize("template", [CHATML, REPR])
def test_calls_that_no_form_writes_are_refused(template: str) -> None:
    tokenizer = made("bytes", template, END)
    with pytest.raises(
        DataError, match=r"leaves out message 1: the tool call add; use one that .*generator.chat_template"
    ):
        ChatTurns(tokenizer, {}).opening(talk()[:3])
    for settings, row in (
        ({"columns": Columns(conversation="m"), "train_on": "last_turn"}, {"m": talk()}),
        ({"columns": Columns("preference", prompt="p")}, {"p": talk()[:3], "chosen": "42", "rejected": "43"}),
    ):
        with pytest.raises(DataError, match=r"message 1: the tool call add\. .*generator.chat_template"):
            Renderer(tokenizer, options={}, **settings).sequences(row)  # type: ignore[arg-type]


def test_an_answer_of_the_past_may_end_with_another_token() -> None:
    """As gpt-oss's: trained is the token that ends a conversation, in each turn, and the policy's own token stays."""
    tokenizer = made("bytes", CHANNELS, END)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    (row,) = Renderer(tokenizer, Columns(conversation="m"), {}).sequences({"m": messages})
    turn = "<|im_start|>user\na<|endoftext|><|im_start|>assistant<think>final\nb<|im_end|>"
    assert tokenizer.decode(row.token_ids) == turn * 2
    own = [token for token, mask in zip(row.token_ids, row.mask, strict=True) if mask]
    assert tokenizer.decode(own) == "<think>final\nb<|im_end|>" * 2
    turns = ChatTurns(tokenizer, {})
    (end,) = tokenizer.encode(END, add_special_tokens=False)
    begin = "<|im_start|>user\na<|endoftext|><|im_start|>assistant"
    assert tokenizer.decode(turns.between([end], messages[:1], end=True).token_ids) == begin
    assert turns.decoded(own[: len(own) // 2]) == "<think>final\nb"
    past = tokenizer.decode(turns.prompt_ids(messages[:3]))
    assert past == "<|im_start|>user\na<|endoftext|><|im_start|>assistant<think>final\nb<|endoftext|>" + begin
