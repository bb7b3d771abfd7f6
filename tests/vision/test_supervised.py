"""Rows of supervised fine-tuning with images: tokens, what is trained of them, their files, and what a trained step changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hpcrl.config import FSDPConfig, MixedPrecisionConfig, ModelConfig, PolicyConfig
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import LoraConfig, Pretrained
from hpcrl.data.conversations import Columns
from hpcrl.data.sources import Source
from hpcrl.data.token_file import open_tokens
from hpcrl.data.tokenize import Recipe, Tokenizer
from hpcrl.data.vision.reader import row_images
from hpcrl.errors import DamagedError, DataError
from hpcrl.trainer.backends.fsdp.model import PackedPolicy, load_model
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.packing import pack
from tests.rows import as_tensors
from tests.trainer.material import make_run
from tests.vision.material import IMAGE, drawn, write_model
from tests.vision.test_agreement import of_one

TALK = [
    {"role": "user", "content": "<image>count: red"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "<image><image>count: blue"},
    {"role": "assistant", "content": "31"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("supervised") / "model", "qwen2_5_vl")


def recipe(model: Path, longest: int = 64) -> Recipe:
    return Recipe(Pretrained(str(model)), ChatTemplateConfig(), {}, Columns(), "assistant", longest, "cut")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Two conversations, of which the second shows nothing, beside their images."""
    for seed in range(3):
        (tmp_path / f"{seed}.png").write_bytes(drawn(seed))
    rows = [{"conversations": TALK, "images": [f"{seed}.png" for seed in range(3)]}, {"conversations": TALK[1:2]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(str(tmp_path / "rows.jsonl"))


def test_a_dataset_keeps_its_images(model: Path, source: Source, tmp_path: Path) -> None:
    """Also when their files are gone; only what the assistant says is trained."""
    run = make_run(tmp_path / "run")
    file = Tokenizer(run, 1, recipe(model)).dataset("train-0", "rows", source)
    for path in tmp_path.glob("*.png"):
        path.unlink()
    (row,), (plain,) = (file.read(at) for at in range(2))
    assert len(row_images(row.tensors)) == 3
    assert not plain.tensors
    placeholders = row.token_ids == IMAGE
    assert placeholders.sum() == 3 * 9
    assert not row.loss_mask[placeholders].any()
    assert row.loss_mask.sum() == 5  # "2", "3", "1", and the ends of both messages
    images = run.dataset("train-0") / "images.bin"
    content = bytearray(images.read_bytes())
    content[len(content) // 2] ^= 1
    images.write_bytes(bytes(content))
    open_tokens.cache_clear()
    with pytest.raises(DamagedError, match=r"image 1 of .* is damaged"):
        open_tokens(run.dataset("train-0")).read(0)


def test_both_answers_of_a_pair_see_the_images_of_its_prompt(model: Path, tmp_path: Path) -> None:
    """Of the row's column, or in parts of whole conversations; an answer may show nothing."""
    (tmp_path / "1.png").write_bytes(drawn(1))
    made = replace(recipe(model), columns=Columns("preference")).renderer()
    row = {"prompt": "<image>count: red", "images": ["1.png"], "chosen": "2", "rejected": "31"}
    part = {"type": "image", "image": str(tmp_path / "1.png")}
    asked = {"role": "user", "content": [part, {"type": "text", "text": "count: red"}]}
    whole = {name: [asked, {"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    for given in (row, whole):
        chosen, rejected = made.sequences(given, tmp_path)
        assert [image[1:] for image in chosen.images] == [(9, str(tmp_path / "1.png"))]
        assert chosen.images == rejected.images
        assert [sum(one.mask) for one in (chosen, rejected)] == [2, 3]
    with pytest.raises(DataError, match="1 of 1 images are shown by no message"):
        made.sequences({**row, "prompt": "count: red"}, tmp_path)


def test_a_row_is_cut_before_an_image(model: Path, source: Source) -> None:
    (row,) = recipe(model).renderer().sequences(next(source.rows()), Path(source.location).parent)
    begins = [begin for begin, *_ in row.images]
    assert [count for _, count, _ in row.images] == [9, 9, 9]
    whole = row.cut(begins[2] + 9)
    assert (len(whole.token_ids), len(whole.images)) == (begins[2] + 9, 3)
    for length in (begins[2] + 1, begins[2] + 8):
        assert (len(row.cut(length).token_ids), len(row.cut(length).images)) == (begins[2], 2)


def test_rows_that_show_too_many_are_refused(model: Path) -> None:
    made = recipe(model).renderer()
    with pytest.raises(DataError, match="messages show more images than the row has"):
        made.sequences({"conversations": TALK, "images": []}, None)
    last = replace(made, train_on="last_turn")
    behind = [*TALK[:2], {"role": "user", "content": [{"type": "image", "image": drawn(1)}]}]
    with pytest.raises(DataError, match="what comes behind the last answer cannot show any"):
        last.sequences({"conversations": [{"role": "user", "content": "count: red"}, *behind[1:]]})


@pytest.mark.parametrize(
    ("policy", "trained"),
    [
        (PolicyConfig(model=ModelConfig(path=""), freeze_pattern=[r"\.visual\."]), "language_model"),
        (PolicyConfig(model=ModelConfig(path="", lora=LoraConfig(rank=4))), "lora_"),
    ],
    ids=["frozen", "lora"],
)
def test_what_is_trained(alone: World, model: Path, source: Source, policy: PolicyConfig, trained: str) -> None:
    """A frozen tower, and adapters in all of it: the same log-probabilities at first, and gradients where there should be some."""
    (tokens,) = recipe(model).renderer().sequences(next(source.rows()), Path(source.location).parent)
    run_dir = Path(source.location).parent / "run"
    file = Tokenizer(make_run(run_dir), 1, recipe(model)).dataset("train-0", "rows", source)
    row = as_tensors(file.read(0)[0])
    assert row.token_ids.tolist() == tokens.token_ids
    exact = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))
    own = replace(policy, fsdp_config=exact, model=replace(policy.model, path=str(model)))
    source_of = ModelSource(path=str(model), role="trainer.policy")
    found = load_model(PackedPolicy, source_of, exact, ForwardConfig(temperature=1.0, chunk_rows=64), alone, own)
    batch = pack([row]).whole()
    logprobs = found.run(batch)[0]
    expected = of_one(AutoModelForImageTextToText.from_pretrained(model), row, 1.0)
    chosen = batch.loss_mask > 0
    torch.testing.assert_close(logprobs[chosen], expected[chosen[:-1]], rtol=0, atol=1e-4)
    logprobs[chosen].sum().backward()
    having = {name for name, each in found.model.named_parameters() if each.grad is not None}
    assert having
    assert all(trained in name or "lm_head" in name for name in having)
    assert any("visual" in name for name in having) == (trained == "lora_")
