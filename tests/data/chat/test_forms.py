"""Tokenizers and templates in the forms of released models: tokens are those of the whole text, and the right ones are trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hpcrl.config import SamplingParams
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.encode import encoded, encoded_pieces
from hpcrl.data.chat.ending import end_ids, trained_end
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.chat.template import ChatTemplate
from hpcrl.data.conversations import Columns, Renderer, Tokens
from hpcrl.data.tokenizer import read_tokenizer
from hpcrl.launch.doctor.tokenizer import of_tokenizer
from hpcrl.rollout.engines.base import engine_sampling
from tests.data.chat.forms import CHATML, FORMS, LLAMA3, PHI3, ZEPHYR, made, write_model

TALK = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "The answer is 3."},
    {"role": "user", "content": "Thank you"},
    {"role": "assistant", "content": "Hello 🙂\n"},
]
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "zephyr": (ZEPHYR, "</s>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "phi3": (PHI3, "<|im_end|>"),
}


def token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    (token_id,) = tokenizer.encode(text, add_special_tokens=False)
    return token_id


def rendered(tokenizer: PreTrainedTokenizerBase, talk: list[dict] = TALK, **settings) -> Tokens:
    (row,) = Renderer(tokenizer, Columns(conversation="m"), {}, **settings).sequences({"m": talk})
    return row


def trained(tokenizer: PreTrainedTokenizerBase, row: Tokens) -> list[str]:
    """Return the parts that are trained, each as text."""
    parts, before = list[list[int]](), False
    for token_id, mask in zip(row.token_ids, row.mask, strict=True):
        if mask and not before:
            parts.append([])
        if mask:
            parts[-1].append(token_id)
        before = mask
    return [str(tokenizer.decode(part)) for part in parts]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", [1, 2])
def test_a_conversation_has_the_tokens_of_its_whole_text(form: str, name: str, turns: int) -> None:
    template, end = TEMPLATES[name]
    tokenizer, talk = made(form, template, "<|endoftext|>"), TALK[: 2 * turns]
    row = rendered(tokenizer, talk)
    text = str(tokenizer.apply_chat_template(talk, tokenize=False))
    assert row.token_ids == tokenizer.encode(text, add_special_tokens=False)
    contents = [one["content"] for one in talk if one["role"] == "assistant"]
    contents = [content.strip() if name == "llama3" else content for content in contents]
    assert [part.lstrip(" ") for part in trained(tokenizer, row)] == [content + end for content in contents]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("eos", ["<|endoftext|>", "own"])
def test_turns_of_a_policy_have_the_tokens_of_the_whole_text(form: str, name: str, eos: str) -> None:
    """The policy says what is trained, and is answered; where it was cut off, the template's end is written for it. Each turn ends once."""
    template, end = TEMPLATES[name]
    tokenizer = made(form, template, end if eos == "own" else eos)
    row, turns = rendered(tokenizer), ChatTurns(tokenizer, {})
    first = row.mask.index(True)
    length = row.mask[first:].index(False)
    answer = row.token_ids[first : first + length]
    opening = turns.opening(TALK[:1]).token_ids
    assert opening == row.token_ids[:first]
    second = first + length + row.mask[first + length :].index(True)
    for said in (answer, answer[: -len(turns.ending)]):
        following = turns.between([*opening, *said], TALK[2:3], end=True).token_ids
        assert [*opening, *said, *following] == row.token_ids[:second]
    assert turns.ends >= {
        tokenizer.encode(one, add_special_tokens=False)[-1] for one in (end, str(tokenizer.eos_token))
    }


def test_other_tokens_that_end_a_turn_are_not_followed_by_another() -> None:
    tokenizer = made("bytes", CHATML, "<|endoftext|>")
    turns = ChatTurns(tokenizer, {})
    prompt = [*turns.opening(TALK[:1]).token_ids, *encoded(tokenizer, "3<|endoftext|>")]
    following = tokenizer.decode(turns.between(prompt, TALK[2:3], end=True).token_ids)
    assert following == "\n<|im_start|>user\nThank you<|im_end|>\n<|im_start|>assistant\n"
    # as GLM's: a turn ends where the next one begins
    by_next = made("bytes", "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", "<|im_end|>")
    by_next.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    user = token(by_next, "<|user|>")
    by_next.eos_token = "<|user|>"
    turns = ChatTurns(by_next, {})
    assert turns.between(
        [*encoded(by_next, "<|user|>a<|assistant|>b"), user], TALK[2:3], end=True
    ).token_ids == encoded(by_next, "Thank you")


def test_ends_are_those_of_all_files(tmp_path: Path) -> None:
    tokenizer = made("bytes", LLAMA3, "<|endoftext|>")
    write_model(tmp_path, tokenizer, eos_token_id=0, text_config={"eos_token_id": [1]})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": -1}))
    model, ending = Pretrained(str(tmp_path)), ChatTemplate(tokenizer, {}).ends
    named = set(map(tokenizer.convert_tokens_to_ids, ("<|endoftext|>", "<|eot_id|>")))
    assert end_ids(tokenizer, model, ending) == {0, 1, 2, 3} | named
    assert ChatTurns(tokenizer, {}, model=model).ends == {0, 1, 2, 3} | named
    assert engine_sampling(SamplingParams(), "train", 99, ends={5, 3})["stop_token_ids"] == [3, 5]
    endless = SamplingParams(additional_kwargs={"ignore_eos": True})
    assert "stop_token_ids" not in engine_sampling(endless, "train", 99, ends={5, 3})


def test_a_tokenizer_gives_the_ids_of_its_file(tmp_path: Path) -> None:
    """As DeepSeek's R1-Distill-Llama: byte-level, with the class of a sentencepiece tokenizer in its files, which transformers builds anew."""
    tokenizer = made("bytes", CHATML, "<|im_end|>")
    write_model(tmp_path, tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizerFast"}))
    text, file = "It is 4. def f():\n\treturn", Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False) != file.encode(text).ids
    found = read_tokenizer(str(tmp_path))
    assert found.encode(text, add_special_tokens=False) == file.encode(text).ids
    assert found.decode(file.encode(text).ids) == text
    assert (found.eos_token, found.chat_template) == ("<|im_end|>", CHATML)
    found.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "config.json").write_text((tmp_path / "config.json").read_text())
    assert read_tokenizer(str(tmp_path / "again")).encode(text, add_special_tokens=False) == file.encode(text).ids


def test_a_token_on_both_sides_of_a_border_is_trained() -> None:
    tokenizer = made("bytes", CHATML, "<|im_end|>")
    (joined,) = tokenizer.encode(" answer", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert encoded_pieces(tokenizer, [(" ans", False), ("wer<|im_end|>", True)]) == ([joined, end], [True, True])
    assert encoded_pieces(tokenizer, [(" ans", True), ("wer<|im_end|>", False)]) == ([joined, end], [True, False])


@pytest.mark.parametrize("form", FORMS)
def test_special_tokens_of_an_answer_are_trained_and_seen_by_rewards(form: str) -> None:
    tokenizer = made(form, CHATML, "<|im_end|>")
    think, end = (tokenizer.encode(one, add_special_tokens=False)[-1] for one in ("<think>", "<|im_end|>"))
    said = "<think>It is 3</think>3 <|im_end|> 4"
    row = rendered(tokenizer, [{"role": "user", "content": "<think>?"}, {"role": "assistant", "content": said}])
    own = [token_id for token_id, mask in zip(row.token_ids, row.mask, strict=True) if mask]
    assert (row.token_ids.count(think), own.count(think), own.count(end), own[-1]) == (1, 1, 1, end)
    assert row.special == 2
    turns = ChatTurns(tokenizer, {})
    assert turns.decoded(own).replace(" ", "") == said.replace(" ", "")
    assert think in turns.prompt_ids([TALK[0], {"role": "assistant", "content": said}, TALK[0]])
    assert think not in turns.prompt_ids([{"role": "user", "content": said}])


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({}, "<|im_start|>"),
        ({"generation_config.json": ["</s>", "<|im_start|>"]}, "<|im_start|>"),
        # as SmolLM2's of a GGUF, whose tokenizer names the token that begins a turn
        ({"config.json": ["<|im_end|>"]}, "<|im_end|>"),
        ({"generation_config.json": ["<|endoftext|>", "<|im_end|>"], "config.json": ["</s>"]}, "<|im_end|>"),
    ],
)
def test_a_text_ends_with_a_token_at_which_generation_stops(
    tmp_path: Path, files: dict[str, list[str]], end: str
) -> None:
    tokenizer = made("bytes", CHATML, "<|im_start|>")
    write_model(tmp_path, tokenizer)
    for name, ends in files.items():
        (tmp_path / name).write_text(
            json.dumps({"model_type": "llama", "eos_token_id": [token(tokenizer, one) for one in ends]})
        )
    model = Pretrained(str(tmp_path))
    (row,) = Renderer(tokenizer, Columns("text"), {}, model=model).sequences({"text": "a document"})
    assert tokenizer.decode(row.token_ids) == f"a document{end}"
    assert all(row.mask)
    assert trained_end(tokenizer, model, {}, texts=True) == row.token_ids[-1]
    (_, found) = of_tokenizer(model, ChatTemplateConfig(), {}, chats=False)
    assert (found.level, found.found.split()[0]) == ("ok" if end == "<|im_start|>" else "warning", end)
    assert "tokenizer: <|im_start|>" in found.found
