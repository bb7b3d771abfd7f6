"""What a reward model is given, and that its scores are those of transformers, however rows share passes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hpcrl.errors import ConfigError, DataError
from tests.reward_service.material import POLICY, load, write_reward_model

PROMPT = [{"role": "user", "content": "sort: dbca"}]
TEXTS = ["abcd", "", "dcba" * 6, "a", "bc", "cab" * 9]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward"))


def test_scores_are_those_of_transformers_however_rows_share_passes(path: Path) -> None:
    reference, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    expected = []
    for text in TEXTS:
        said = [*PROMPT, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(said, return_tensors="pt", return_dict=False)
        assert ids[0].tolist() == load(path).tokens(PROMPT, text)
        with torch.no_grad():
            expected.append(reference(ids).logits.item())
    assert max(expected) - min(expected) > 0.1
    for batch_tokens in (1, 40, 1000):
        model, passes = load(path, batch_tokens), list[int]()
        rows = [model.tokens(PROMPT, text) for text in TEXTS]
        assert model.scores(rows, lambda: passes.append(1)) == pytest.approx(expected, abs=1e-5)  # noqa: B023
        assert len(passes) == {1: 6, 40: 4, 1000: 1}[batch_tokens]


def test_without_a_padding_token_each_row_has_a_pass_of_its_own(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "m")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((path / name).read_text())
        for entry in ("pad_token", "pad_token_id"):
            content.pop(entry, None)
        (tmp_path / "m" / name).write_text(json.dumps(content))
    model, passes = load(tmp_path / "m"), list[int]()
    assert model.padding is None, "the tokenizer's class has one, which this vocabulary does not have"
    rows = [load(path).tokens(PROMPT, text) for text in ("abcd", "dcba", "a", "abcd")]
    found = model.scores(rows, lambda: passes.append(1))
    assert found == pytest.approx(load(path).scores(rows), abs=1e-5)
    assert len(passes) == 4


def test_special_tokens_in_a_response_are_text(path: Path) -> None:
    model = load(path)
    (end,) = model.conversations.tokenizer.encode("<|end|>")
    assert model.tokens(PROMPT, "ab<|end|>").count(end) == 2
    assert model.tokens(PROMPT, "ab<|end|>") != model.tokens(PROMPT, "ab")


def test_a_conversation_that_is_too_long_is_refused(path: Path) -> None:
    model = load(path)
    longest = model.conversations.longest
    assert longest is not None
    with pytest.raises(DataError, match=rf"has \d+ tokens, and the reward model takes at most {longest}"):
        model.tokens(PROMPT, "ab" * 1000)


def test_what_is_no_reward_model_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"setting: .*model is no reward model: .*found Qwen2ForCausalLM of 2 labels"):
        load(POLICY)
    two = write_reward_model(tmp_path / "two", labels=2)
    with pytest.raises(
        DataError, match=r"expected a sequence classifier of one label .*, found Qwen2ForSequence.* of 2"
    ):
        load(two)
    with pytest.raises(DataError, match=r"setting: the tokenizer of .*nowhere cannot be loaded"):
        load(tmp_path / "nowhere")
    shutil.copytree(path, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"setting: the reward model .*damaged cannot be loaded"):
        load(tmp_path / "damaged")


def test_without_a_chat_template_one_has_to_be_given(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template; .*service.chat_template, --chat-template"):
        load(tmp_path / "m")
    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}")
    model = load(tmp_path / "m", chat_template=str(own))
    assert model.conversations.tokenizer.decode(model.tokens(PROMPT, "abcd")) == "sort: dbca<|end|>abcd<|end|>"
