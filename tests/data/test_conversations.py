"""Rows of supervised fine-tuning as tokens: whatever the template, exactly what the assistant says is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.conversations import Columns, Renderer
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.errors import DataError
from tests.paths import CONFIGS

MODEL = str(CONFIGS / "quickstart" / "model")
TALK = [
    {"role": "system", "content": "sort"},
    {"role": "user", "content": "cab"},
    {"role": "assistant", "content": "<think>\na\n</think>\n\nabc"},
    {"role": "user", "content": "ed"},
    {"role": "assistant", "content": "<think>\nd\n</think>\n\nde"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: of turns before the last question thoughts are dropped, and behind it a message without thoughts gets empty ones.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' }}\n</think>\n\n{% endif %}"
    "{{ said }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not (enable_thinking | default(true)) %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As Mistral's: nothing is written where an answer is asked for, and the system's message becomes part of the question.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}"
    "[INST] {% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|end|>{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}"
)


@pytest.fixture
def renderer(tmp_path: Path):
    def make(
        template: str = CHATML, columns: Columns | None = None, special: str = "<|im_end|>", **settings
    ) -> Renderer:
        path = tmp_path / "own.jinja"
        path.write_text(template)
        tokenizer = load_tokenizer(Pretrained(MODEL), ChatTemplateConfig(source="file", name_or_path=str(path)))
        tokenizer.add_special_tokens({"extra_special_tokens": [special]})
        options = settings.pop("options", {})
        return Renderer(tokenizer, columns or Columns(), options, **settings)

    return make


def test_the_assistants_messages_are_trained_to_the_token_that_ends_them(renderer) -> None:
    made = renderer()
    pieces = made.pieces(TALK)
    assert [text for text, trained in pieces if trained] == [
        TALK[2]["content"] + "<|im_end|>",
        TALK[4]["content"] + "<|im_end|>",
    ]
    assert "".join(text for text, _ in pieces) == made.tokenizer.apply_chat_template(TALK, tokenize=False)


@pytest.mark.parametrize(("what", "trained"), [("last_turn", [4]), ("assistant", [2, 4])])
def test_thoughts_that_a_template_drops_later_are_trained_where_they_are_said(
    renderer, what: str, trained: list[int]
) -> None:
    made = renderer(QWEN3, train_on=what)
    pieces = made.pieces(TALK)
    assert [text for text, mask in pieces if mask] == [TALK[at]["content"] + "<|im_end|>" for at in trained]
    before = "".join(text for text, _ in pieces[: [mask for _, mask in pieces].index(True)])
    asked = made.tokenizer.apply_chat_template(TALK[: trained[0]], tokenize=False, add_generation_prompt=True)
    assert before == asked, "what an engine is given when it is to say that"
    whole = made.tokenizer.apply_chat_template(TALK, tokenize=False)
    assert ("".join(text for text, _ in pieces) == whole) == (what == "last_turn")


def test_what_the_template_writes_where_an_answer_is_asked_for_is_not_trained(renderer) -> None:
    talk = [TALK[1], {"role": "assistant", "content": "abc"}]
    thinking, silent = renderer(QWEN3), renderer(QWEN3, options={"enable_thinking": False})
    assert [text for text, mask in thinking.pieces(talk) if mask] == ["<think>\n\n</think>\n\nabc<|im_end|>"]
    assert [text for text, mask in silent.pieces(talk) if mask] == ["abc<|im_end|>"]


def test_a_template_that_writes_nothing_before_an_answer(renderer) -> None:
    made = renderer(MISTRAL, special="<|stop|>")
    assert [text for text, mask in made.pieces(TALK[:3]) if mask] == [" " + TALK[2]["content"] + "<|end|>"]
    assert "".join(text for text, _ in made.pieces(TALK)) == made.tokenizer.apply_chat_template(TALK, tokenize=False)
    with pytest.raises(DataError, match="the chat template refuses its messages: no tool"):
        made.sequences({"conversations": [*TALK, {"role": "tool", "content": "?"}]})[0]


def test_tokens_are_those_of_the_prompt_and_of_the_answer(renderer) -> None:
    made = renderer()
    found = made.sequences({"conversations": TALK[:3]})[0]
    prompt = made.tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True, return_dict=False)
    answer = made.tokenizer.encode(TALK[2]["content"] + "<|im_end|>", add_special_tokens=False)
    after = made.tokenizer.encode("\n", add_special_tokens=False)
    assert found.token_ids == [*prompt, *answer, *after]
    assert found.mask == [False] * len(prompt) + [True] * len(answer) + [False] * len(after)


def test_all_tokens_or_none_of_some_messages(renderer) -> None:
    assert all(renderer(train_on="all").sequences({"conversations": TALK})[0].mask)
    silenced = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    assert [text for text, mask in renderer().pieces(silenced) if mask] == [TALK[4]["content"] + "<|im_end|>"]


def test_rows_of_each_kind(renderer) -> None:
    plain = renderer().sequences(
        {"conversations": [{"role": "user", "content": "cab"}, {"role": "assistant", "content": "abc"}]}
    )[0]
    share_gpt = [{"from": "human", "value": "cab"}, {"from": "gpt", "value": "abc"}]
    assert renderer().sequences({"conversations": share_gpt})[0] == plain
    answered = Columns("prompt_response", prompt="q", response="a")
    assert renderer(columns=answered).sequences({"q": "cab", "a": "abc"})[0] == plain
    assert renderer(columns=answered).sequences({"q": share_gpt[:1], "a": "abc"})[0] == plain
    earlier = [*share_gpt, {"from": "human", "value": "ed"}]
    assert renderer(columns=answered).sequences({"q": earlier, "a": "de"})[0].trained == len("de") + 1, (
        "the prompt is not trained"
    )
    text = renderer(columns=Columns("text")).sequences({"text": "abc"})[0]
    eos = renderer().tokenizer.eos_token_id
    assert (text.token_ids[-1], all(text.mask), len(text.token_ids)) == (eos, True, 4)
    given = renderer(columns=Columns("tokens"))
    assert given.sequences({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})[0].mask == [False, True, True]
    assert given.sequences({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]})[0].mask == [False, False, True]
    assert given.sequences({"input_ids": [5, 6, 7]})[0].mask == [True, True, True]


def test_special_tokens_in_texts_are_text(renderer) -> None:
    talk = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c"}]
    found = renderer().sequences({"conversations": talk})[0]
    ending = renderer().tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert found.token_ids.count(ending) == 2
    assert renderer(special_tokens=True).sequences({"conversations": talk})[0].token_ids.count(ending) == 3


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        (Columns(), [1], "expected an object with columns, found list"),
        (Columns(), {"messages": TALK}, r"no column `conversations` \(data.conversation_column\); its columns are messages"),
        (Columns(), {"conversations": "text"}, "expected a list of chat messages"),
        (Columns(), {"conversations": [{"role": "user\n", "content": "x"}]}, "expected a chat message such as"),
        (Columns(), {"conversations": [{"role": "user", "content": "x", "weight": 2}]}, "expected the weight 0 or 1"),
        (Columns("prompt_response"), {"prompt": "x"}, r"no column `response` \(data.response_column\)"),
        (Columns("text"), {"text": 3}, "expected a text, found 3"),
        (Columns("tokens"), {"input_ids": [1, "x"]}, "column `input_ids`: expected whole numbers from 0"),
        (Columns("tokens"), {"input_ids": [1, 2], "labels": [1]}, "expected 2 entries, as many as input_ids, found 1"),
        (Columns("tokens"), {"input_ids": [1, 2], "labels": [1, 3]}, "entry 1 is 3, expected the token's own id 2 or -100"),
    ],
)  # fmt: skip
def test_a_row_that_is_something_else_is_told(renderer, columns: Columns, row, message: str) -> None:
    with pytest.raises(DataError, match=message):
        renderer(columns=columns).sequences(json.loads(json.dumps(row)))[0]


def test_a_template_that_writes_the_past_in_another_way_is_refused(renderer) -> None:
    counting = "{{ messages | length }}" + CHATML
    with pytest.raises(DataError, match="in another way once that is there"):
        renderer(counting).sequences({"conversations": TALK[:3]})[0]


PAIR = Columns("preference")
PROMPT = [{"role": "system", "content": "sort"}, {"role": "user", "content": "cab"}]


def answer(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def test_both_answers_of_a_pair_stand_behind_the_same_prompt(renderer) -> None:
    made = renderer(columns=PAIR)
    chosen, rejected = made.sequences({"prompt": PROMPT, "chosen": answer("abc"), "rejected": answer("cb")})
    prompt = made.tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    for found, said in ((chosen, "abc"), (rejected, "cb")):
        said = made.tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False)
        after = made.tokenizer.encode("\n", add_special_tokens=False)
        assert found.token_ids == [*prompt, *said, *after]
        assert found.mask == [False] * len(prompt) + [True] * len(said) + [False] * len(after)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "chosen": "abc", "rejected": "cb"},
        {"chosen": [*PROMPT, *answer("abc")], "rejected": [*PROMPT, *answer("cb")]},
        {"prompt": "cab", "chosen": [*PROMPT, *answer("abc")], "rejected": [*PROMPT, *answer("cb")]},
        {"prompt": None, "chosen": [*PROMPT, *answer("abc")], "rejected": [*PROMPT, *answer("cb")]},
    ],
)
def test_a_prompt_may_be_a_column_or_what_both_answers_begin_with(renderer, row: dict) -> None:
    made = renderer(columns=PAIR)
    assert made.sequences(row) == made.sequences({"prompt": PROMPT, "chosen": answer("abc"), "rejected": answer("cb")})


def test_an_answer_has_several_turns_and_earlier_ones_are_not_trained(renderer) -> None:
    earlier = [*PROMPT, *answer("abc"), {"role": "user", "content": "ed"}]
    made, tail = renderer(columns=PAIR), [{"role": "user", "content": "gf"}, *answer("fg")]
    chosen, rejected = made.sequences(
        {"chosen": [*earlier, *answer("de"), *tail], "rejected": [*earlier, *answer("ed")]}
    )
    assert (chosen.trained, rejected.trained) == (len("de") + 1 + len("fg") + 1, len("ed") + 1)
    text = Columns("preference", prompt="q", chosen="good", rejected="bad")
    named = renderer(columns=text).sequences({"q": earlier, "good": "de", "bad": "ed"})
    assert named[1] == rejected


def test_texts_without_a_prompt_are_whole(renderer) -> None:
    made = renderer(columns=PAIR)
    chosen, rejected = made.sequences({"chosen": "cab abc", "rejected": "cab abb"})
    eos = made.tokenizer.eos_token_id
    assert chosen.token_ids == [*made.tokenizer.encode("cab abc"), eos]
    alike = len(made.tokenizer.encode("cab ab"))
    assert chosen.mask == rejected.mask == [False] * alike + [True] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": PROMPT, "chosen": "a"}, r"no column `rejected` \(data.rejected_column\); its columns are chosen, prompt"),
        ({"prompt": PROMPT, "chosen": 3, "rejected": "a"}, "expected text or a list of chat messages .*, found 3"),
        ({"chosen": [*PROMPT, *answer("a")], "rejected": "a"}, "column `chosen` begins with a message of system, column `rejected` with one of assistant"),
    ],
)  # fmt: skip
def test_a_pair_that_is_none_is_told(renderer, row: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        renderer(columns=PAIR).sequences(row)
