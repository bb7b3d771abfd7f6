"""Rows with tools and messages in the forms of published datasets: the same tokens from each of them, or an error that names the row."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpcrl.config import Config
from hpcrl.data.chat.messages import read_messages, read_tools
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.conversations import Columns, Renderer
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from hpcrl.data.tokenize import Recipe, tokenized
from hpcrl.errors import ConfigError, DataError
from tests.data.chat.forms import CHATML, R1, TOOLS, made, write_model


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def talk(question: str, call: dict[str, Any]) -> list[dict[str, Any]]:
    answer = [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."}]
    return [{"role": "user", "content": question}, call, *answer]


WEATHER, ADD = (
    tool("weather", city={"type": "string"}),
    tool("add", a={"type": "integer", "minimum": 0}, b={"type": "integer"}),
)
CALLS = [calling("weather", city="Oslo"), calling("add", a=1, b=2)]
ROWS = [{"messages": talk("?", call), "tools": [used]} for call, used in zip(CALLS, (WEATHER, ADD), strict=True)]
PAIRS = [
    {"prompt": [{"role": "user", "content": "?"}], "chosen": [one], "rejected": [other], "tools": [used]}
    for one, other, used in zip(CALLS, CALLS[::-1], (WEATHER, ADD), strict=True)
]
PROMPTS = [
    {"prompt": row["messages"][:3], "tools": row["tools"], "env_class": "x", "reward_spec": spec}
    for row, spec in zip(
        ROWS, ({"ground_truth": "1", "rule": {"a": 1}}, {"ground_truth": "2", "rule": {"b": 2}}), strict=True
    )
]


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """Write rows as a file, or a folder, of some kind."""
    path = folder / f"rows{kind}"
    if kind == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)
    table = pa.Table.from_pylist(rows)
    if kind == ".parquet":
        pq.write_table(table, path)
        return str(path)
    if kind == "saved":  # as Dataset.save_to_disk
        path.mkdir()
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with (
        pa.OSFile(str(path / "data.arrow" if kind == "saved" else path), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    return str(path)


def tokens(columns: Columns, rows: list[Any]) -> list[Any]:
    renderer = Renderer(made("bytes", TOOLS, "<|im_end|>"), columns, {})
    return [renderer.sequences(row) for row in rows]


@pytest.mark.parametrize("kind", [".parquet", ".arrow", "saved"])
@pytest.mark.parametrize(("format", "rows"), [("conversations", ROWS), ("preference", PAIRS)])
def test_rows_of_arrow_are_trained_as_those_of_json(tmp_path: Path, kind: str, format: str, rows: list[Any]) -> None:
    columns = Columns(format, conversation="messages")  # type: ignore[arg-type]
    plain = tokens(columns, rows)
    assert tokens(columns, list(Source(written(tmp_path, kind, rows)).rows())) == plain
    renderer = Renderer(made("bytes", TOOLS, "<|im_end|>"), columns, {})
    assert '"arguments": {"city": "Oslo"}}' in renderer.decode(plain[0][0].token_ids)


@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_prompts_of_arrow_are_those_of_json(tmp_path: Path, kind: str) -> None:
    plain = load_prompts([Source(written(tmp_path, ".jsonl", PROMPTS))], None)
    found = load_prompts([Source(written(tmp_path, kind, PROMPTS))], None)
    assert [(one.messages, one.extras) for one in found] == [(one.messages, one.extras) for one in plain]
    assert plain[0].extras["reward_spec"]["rule"] == {"a": 1}


def test_tools_of_a_prompt_reach_it_as_in_training(tmp_path: Path) -> None:
    tokenizer = made("bytes", TOOLS, "<|im_end|>")
    (prompt, _) = load_prompts([Source(written(tmp_path, ".jsonl", PROMPTS))], None)
    (row,) = Renderer(tokenizer, Columns(conversation="messages"), {}, train_on="last_turn").sequences(ROWS[0])
    found = ChatTurns(tokenizer, {}).opening(prompt.messages, read_tools(prompt.extras["tools"])).token_ids
    assert found == row.token_ids[: row.mask.index(True)]
    assert '"name": "weather"' in tokenizer.decode(found)


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    row = copy.deepcopy(row)
    for message in row["messages"]:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return row


FORMS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "tools as a text": lambda row: row | {"tools": json.dumps(row["tools"])},
    "each tool as a text": lambda row: row | {"tools": [json.dumps(one) for one in row["tools"]]},
    "arguments as a text": as_text,
    "calls without a type": lambda row: (
        row
        | {
            "messages": [
                one | ({"tool_calls": [call["function"] for call in one["tool_calls"]]} if "tool_calls" in one else {})
                for one in row["messages"]
            ]
        }
    ),
    "null where there is no call": lambda row: (
        row | {"messages": [{"tool_calls": None, "name": None, **one} for one in row["messages"]]}
    ),
    "content as null beside a call": lambda row: (
        row | {"messages": [one | {"content": one["content"] or None} for one in row["messages"]]}
    ),
    "content in parts": lambda row: (
        row | {"messages": [one | {"content": [{"type": "text", "text": one["content"]}]} for one in row["messages"]]}
    ),
    "ShareGPT": lambda row: (
        row
        | {
            "messages": [
                {
                    "from": {"user": "human", "assistant": "gpt", "tool": "observation"}[one["role"]],
                    "value": one["content"],
                }
                | {name: value for name, value in one.items() if name == "tool_calls"}
                for one in row["messages"]
            ]
        }
    ),
    "ShareGPT's function_call": lambda row: (
        row
        | {
            "messages": [
                {"from": "function_call", "value": json.dumps(one["tool_calls"][0]["function"])}
                if "tool_calls" in one
                else one
                for one in row["messages"]
            ]
        }
    ),
    "value and human in the place of content and user": lambda row: (
        row
        | {
            "messages": [
                {"role": {"user": "human", "assistant": "gpt"}.get(one["role"], one["role"]), "value": one["content"]}
                | {name: value for name, value in one.items() if name == "tool_calls"}
                for one in row["messages"]
            ]
        }
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_conversation_in_another_form(form: str) -> None:
    columns = Columns(conversation="messages")
    assert tokens(columns, [FORMS[form](row) for row in ROWS]) == tokens(columns, ROWS)


def test_the_column_system_of_a_prompt_is_read_as_in_training(tmp_path: Path) -> None:
    first = {"role": "system", "content": "Be brief."}
    rows = [
        {"prompt": "a", "system": "Be brief."},
        {"prompt": [first, {"role": "user", "content": "a"}], "system": "x"},
    ]
    for one in load_prompts([Source(written(tmp_path, ".jsonl", rows))], "x"):
        assert one.messages == [first, {"role": "user", "content": "a"}]
        assert "system" in one.extras


def test_columns_beside_the_prompt() -> None:
    renderer = Renderer(
        made("bytes", CHATML, "<|im_end|>"), Columns("prompt_response", prompt="instruction", response="output"), {}
    )
    (row,) = renderer.sequences({"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."})
    text = renderer.decode(row.token_ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n")
    pairs = Renderer(renderer.tokenizer, Columns("preference"), {})
    for row in ({"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}):
        chosen, _ = pairs.sequences({**row, "chosen": "b", "rejected": "c", "system": "Be brief."})
        assert pairs.decode(chosen.token_ids).startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>"
        )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"role": "user", "said": "x"}], "a message of user has no content"),
        ([{"role": "assistant", "content": None}], "a message of assistant has no content"),
        ([{"role": "user", "content": 3}], "content of a message of user: expected a text or a list of parts, found 3"),
        ([calling("x") | {"tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}], "arguments of a tool call: expected JSON"),
        ([calling("x") | {"tool_calls": [{"function": {"name": "x", "arguments": "[1]"}}]}], "expected an object, or its JSON text"),
        ([calling("x") | {"tool_calls": [{"function": {}}]}], "a function that has a name and arguments"),
    ],
)  # fmt: skip
def test_messages_that_are_none(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_messages(value)


@pytest.mark.parametrize("value", ["{", "3", [3], [["x"]]])
def test_tools_that_are_none(value: Any) -> None:
    with pytest.raises(DataError, match="tools: expected"):
        read_tools(value)
    assert read_tools(None) == read_tools("") == read_tools("[]") == []


THOUGHT = "<think>\nlet me add\n</think>\n\nIt is 3."


def _written(content: str, end: str = "<|im_end|>\n") -> str:
    return "{% for m in messages %}{{ " + content + " }}" + end + "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "answer", "lost"),
    [
        (R1, {"content": THOUGHT}, "message 1: content 'let me add'"),
        (CHATML, {"content": "It is 3.", "reasoning_content": "let me add"}, "message 1: reasoning_content 'let me add'"),
        (CHATML, calling("add", a=1), "message 1: the tool call add"),
        ("{% for m in messages %}{{ m.content[:30] }}<|im_end|>{% endfor %}", {"content": "The answer is " + "3" * 40}, "message 1: content"),
        (_written("m.content | replace('<think>', '') | replace('</think>', '')"), {"content": THOUGHT}, "message 1: content '<think>'"),
        (_written("m.content | replace('</think>', '')"), {"content": THOUGHT}, "message 1: content '</think>'"),
        (_written("m.content | replace('<answer>', '') | replace('</answer>', '')"), {"content": "It is <answer>3</answer>"}, "message 1: content '<answer>'"),
        (_written("m.content | replace('</answer>', '')"), {"content": "It is <answer>3</answer>"}, "message 1: content '</answer>'"),
        (_written("m.content | replace('<think>', '[THINK]') | replace('</think>', '[/THINK]')"), {"content": THOUGHT}, None),
        (_written("m.content | replace('<think>', '') | replace('</think>', '')"), {"content": "<think>\n\n</think>\n\nIt is 3."}, None),
        (_written("m.content"), {"content": "x <b and c> y"}, None),
        (TOOLS.replace("'name': c.function.name, ", ""), calling("add", a=1), "message 1: the tool call add"),
        (TOOLS.replace("'name': c.function.name, ", ""), calling("add", a=1) | {"content": "I call add"}, "message 1: the tool call add"),
        (TOOLS.replace("c.function.arguments}", "c.function.arguments.values() | list}"), calling("add", a=1), "message 1: the tool call add"),
        (_written("m.content", end="\n"), {"content": "x", "role": "assistant"}, None),
        ("{% for m in messages %}{{ m.content }}{% if m.content != 'x' %}<|im_end|>{% endif %}{% endfor %}", {"content": "x"}, "message 1: the token that ends it"),
        (CHATML, {"content": THOUGHT}, None),
        (TOOLS, calling("add", a="x\ny", b=[1.5, True]), None),
        ("{% for m in messages %}{{ m.content | trim }}<|im_end|>{% endfor %}", {"content": " It is\n3. "}, None),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_of_an_answer(template: str, answer: dict[str, Any], lost: str | None) -> None:
    row = {"m": [{"role": "user", "content": "?"}, {"role": "assistant", **answer}]}
    tokenizer, columns = made("bytes", template, "<|im_end|>"), Columns(conversation="m")
    if lost is None:
        assert not Renderer(tokenizer, columns, {}).sequences(row)[0].lost
        return
    with pytest.raises(
        DataError, match=rf"leaves out text that should be trained: {lost}.*generator.chat_template.*data.lost"
    ):
        Renderer(tokenizer, columns, {}).sequences(row)
    assert Renderer(tokenizer, columns, {}, refuse_lost=False).sequences(row)[0].lost
    silent = {"m": [row["m"][0], row["m"][1] | {"weight": 0}, *row["m"][:1], {"role": "assistant", "content": "b"}]}
    if "tool_calls" in answer:  # what follows a call cannot be understood without it
        with pytest.raises(DataError, match=lost):
            Renderer(tokenizer, columns, {}).sequences(silent)
        return
    assert not Renderer(tokenizer, columns, {}).sequences(silent)[0].lost


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].content.nothing() }}", "'str object' has no attribute 'nothing'"),
        ("{{ messages[0]['content'].index('q') }}", "ValueError: substring not found"),
        ("{{ '%(x)s' % {} }}", "KeyError: 'x'"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_whatever_a_template_raises_names_the_row(tmp_path: Path, template: str, error: str) -> None:
    model = write_model(tmp_path / "model", made("bytes", template, "<|im_end|>"))
    rows = written(tmp_path, ".jsonl", [{"conversations": talk("x", CALLS[0])}])
    config = Config.from_dict(
        {
            "data": {"train_data": [rows]},
            "trainer": {"mode": "sft", "max_length": 64, "policy": {"model": {"path": str(model)}}, "eval_interval": 0},
        }
    )
    with pytest.raises(DataError, match=rf"rows.jsonl, row 0: the chat template refuses its messages: .*{error}"):
        list(tokenized(Source(rows), Recipe.of(config)))


def test_without_a_chat_template_the_setting_is_named() -> None:
    tokenizer = made("bytes", "", "<|im_end|>")
    with pytest.raises(
        ConfigError, match=r"generator.chat_template: the tokenizer has no chat template; .*name_or_path"
    ):
        ChatTurns(tokenizer, {}).opening([{"role": "user", "content": "x"}])
