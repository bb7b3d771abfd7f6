"""JSON files of models that are no object, nested too deeply, or have sizes of no model, are refused with their names wherever they are read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.ending import declared_ends
from hpcrl.data.entries import read_entries
from hpcrl.data.exported_files import exported_files
from hpcrl.data.model_config import ConfiguredModel
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.reader import ImageReader
from hpcrl.errors import DataError
from hpcrl.launch.submit.models import entries_of
from tests.paths import CONFIGS

MODEL = CONFIGS / "quickstart" / "model"
SHAPES = ["[1, 2]", "5", "[" * 100_000, '{"a": ' * 41 + "1" + "}" * 41, "", "\xff", "{"]
SIZES = [
    {"hidden_size": "64"},
    {"num_hidden_layers": 10**12},
    {"vocab_size": -1},
    {"num_attention_heads": True},
    {"text_config": [1]},
    {"text_config": {"hidden_size": 10**12}},
    {"intermediate_size": [64, "64"]},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def load(source: Pretrained) -> Any:
    return load_tokenizer(source, ChatTemplateConfig())


def refused(file: Path) -> str:
    return f"^(.*: )?{re.escape(str(file))}: .*(expected|levels deep)"


@pytest.mark.parametrize("text", [*SHAPES, *map(json.dumps, SIZES)])
def test_config_json(model: Path, text: str) -> None:
    source, file = ConfiguredModel(path=str(model), role="trainer.policy"), model / "config.json"
    file.write_text(text, "latin-1")
    for read in (entries_of, declared_ends, ImageReader.of, ConfiguredModel.config):
        with pytest.raises(DataError, match=refused(file)):
            read(source)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", SHAPES)
def test_files_beside_it(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text, "latin-1")
    source = Pretrained(str(model))
    read: list[Any] = [declared_ends] if name == "generation_config.json" else [load]
    if name == "tokenizer_config.json":
        read.append(lambda source: exported_files(source, None, None))
    for each in read:
        with pytest.raises(DataError, match=refused(model / name)):
            each(source)


def test_a_tokenizer_that_is_nested_too_deeply(model: Path) -> None:
    (model / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"the tokenizer of .* cannot be loaded"):
        load(Pretrained(str(model)))


def test_released_forms_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    entries = {
        "text_config": None,
        "head_dim": None,
        "intermediate_size": [64, 128],
        "vision_config": {"hidden_size": 8},
    }
    file.write_text("\ufeff" + json.dumps(entries), "utf-8")
    assert read_entries(file) == entries
