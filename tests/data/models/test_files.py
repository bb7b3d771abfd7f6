"""What an export takes from its model beside the weights: files as they are, and the token that was trained as the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.ending import trained_end
from hpcrl.data.exported_files import exported_files
from hpcrl.errors import DataError
from tests.data.chat.forms import CHATML, made, write_model
from tests.paths import CONFIGS

QUICKSTART = CONFIGS / "quickstart" / "model"
OWN_FILES = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QUICKSTART, tmp_path / "model"))


def files(model: Path, template: str | None = None, end: int | None = None) -> dict[str, bytes]:
    return exported_files(Pretrained(str(model)), template, end)


def entries(content: bytes) -> dict[str, Any]:
    return json.loads(content)


def put(model: Path, name: str, value: Any) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(json.dumps(value))


def test_files_are_copied_byte_for_byte(model: Path) -> None:
    more = {
        "special_tokens_map.json": '{"eos_token":\t"<|end|>"}',
        "tokenizer.model": "\x00\x01",
        "merges.txt": "a b\r\n",
        "modeling_own.py": "x = 1\n",
        "preprocessor_config.json": "{ }",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
    }
    for name, text in more.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(text.encode())
    for name in ("model.safetensors.index.json", "manifest.json", "adapter_config.json", "optimizer.pt", "README.md"):
        (model / name).write_text("of the model's own weights")
    put(
        model,
        "tokenizer_config.json",
        entries((model / "tokenizer_config.json").read_bytes()) | {"extra_special_tokens": {}},
    )
    found = files(model)
    assert sorted(found) == sorted([*OWN_FILES, *more])
    assert all(content == (model / name).read_bytes() for name, content in found.items())


INVALID = {"temperature": 0.9, "top_p": 0.6, "do_sample": False, "pad_token_id": 0, "max_length": 4096}


def test_an_invalid_combination_stays_and_the_trained_end_is_added(model: Path) -> None:
    """As in Llama-2-chat, whose generation_config.json transformers does not save again."""
    put(model, "generation_config.json", INVALID | {"eos_token_id": 2})
    with pytest.raises(ValueError, match="invalid"):
        GenerationConfig.from_pretrained(model).save_pretrained(model)
    assert files(model, end=2)["generation_config.json"] == (model / "generation_config.json").read_bytes()
    assert entries(files(model, end=5)["generation_config.json"]) == INVALID | {"eos_token_id": [2, 5]}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"eos_token_id": [1, 7]}, {"eos_token_id": [1, 7, 5]}),
        ({"eos_token_id": None}, {"eos_token_id": [5]}),
        # transformers 4 would take what config.json has
        ({"_from_model_config": True, "eos_token_id": 1}, {"_from_model_config": False, "eos_token_id": [1, 5]}),
    ],
)
def test_the_trained_end_is_one_of_several(model: Path, own: dict[str, Any], expected: dict[str, Any]) -> None:
    put(model, "generation_config.json", own)
    assert entries(files(model, end=5)["generation_config.json"]) == expected


@pytest.mark.parametrize("inner", [False, True])
def test_without_a_generation_config_the_ends_of_config_json_stay(model: Path, inner: bool) -> None:
    (model / "generation_config.json").unlink()
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    put(model, "config.json", {"text_config": tokens} if inner else tokens)
    assert "generation_config.json" not in files(model, end=1)
    assert entries(files(model, end=5)["generation_config.json"]) == {"eos_token_id": [1, 5], "pad_token_id": 0}


def test_a_generation_config_that_is_no_json_is_copied(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "generation_config.json").write_text("{'eos_token_id': 2}")
    assert files(model, end=5)["generation_config.json"] == b"{'eos_token_id': 2}"
    assert "without the token 5" in caplog.text


def test_another_template_takes_each_place_of_the_own_one(model: Path) -> None:
    own = json.loads((model / "tokenizer_config.json").read_text())
    own["extra_special_tokens"] = {}
    put(model, "tokenizer_config.json", own | {"chat_template": [{"name": "default", "template": "old"}]})
    put(model, "chat_template.json", {"chat_template": "old"})
    put(model, "additional_chat_templates/tools.jinja", "old")
    found = files(model, "{{ 'née' }}")
    assert entries(found["tokenizer_config.json"]) == own | {"chat_template": "{{ 'née' }}"}
    assert entries(found["chat_template.json"]) == {"chat_template": "{{ 'née' }}"}
    assert found["chat_template.jinja"].decode() == "{{ 'née' }}"
    assert "additional_chat_templates/tools.jinja" not in found


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        # as transformers 5 saves it, which version 4 cannot load
        ({"extra_special_tokens": ["<a>"]}, {"additional_special_tokens": ["<a>"]}),
        ({"extra_special_tokens": []}, {}),
        ({"model_specific_special_tokens": {"boi_token": "<a>"}}, {"model_specific_special_tokens": {"boi_token": "<a>"}, "extra_special_tokens": {"boi_token": "<a>"}}),
        ({"tokenizer_class": "TokenizersBackend"}, {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}),
        ({"tokenizer_class": "LlamaTokenizerFast"}, {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ],
)  # fmt: skip
def test_a_tokenizer_config_that_each_version_loads(
    tmp_path: Path, own: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The class is another one only where the named one is unknown, or gives other ids than tokenizer.json."""
    model, kept = write_model(tmp_path / "model", made("bytes", CHATML, "<|im_end|>")), {"eos_token": "<|im_end|>"}
    put(model, "tokenizer_config.json", kept | {"tokenizer_class": "PreTrainedTokenizerFast"} | own)
    found = files(model)
    written = entries(found["tokenizer_config.json"])
    assert written == kept | {"tokenizer_class": "PreTrainedTokenizerFast"} | expected
    assert found["tokenizer.json"] == (model / "tokenizer.json").read_bytes()
    (model / "tokenizer_config.json").write_bytes(found["tokenizer_config.json"])
    text = "x = [1, 2]  # as it is"
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    assert AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False) == ids
    assert files(model) == found


def test_a_model_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone: its tokenizer, template and configuration cannot be copied"):
        files(tmp_path / "gone")


@pytest.mark.parametrize(
    ("template", "texts", "expected"),
    [
        (None, False, "<|end|>"),
        ("{% for m in messages %}{{ m.content }}<|system|>\n<|end|>{% endfor %}", False, "<|system|>"),
        ("{% for m in messages %}{{ m.content }}<|system|>\n<|end|>{% endfor %}", True, "<|end|>"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", False, "<|end|>"),
        ("{{ raise_exception('no') }}", False, "<|end|>"),
    ],
)
def test_the_trained_end_is_what_the_template_writes_behind_an_answer(
    template: str | None, texts: bool, expected: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    tokenizer.chat_template = template or tokenizer.chat_template
    assert trained_end(tokenizer, Pretrained(str(QUICKSTART)), {}, texts=texts) == tokenizer.convert_tokens_to_ids(
        expected
    )
