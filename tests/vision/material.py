"""Tiny vision-language models of each family, with the tokenizer of configs/count_shapes, and drawn images."""

from __future__ import annotations

import io
import json
import random
import runpy
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.messages import with_images
from hpcrl.data.vision.reader import ImageReader, named_tensors
from hpcrl.types import Row
from tests.paths import CONFIGS

SHAPES = CONFIGS / "count_shapes"
MADE: dict[str, Any] = runpy.run_path(str(SHAPES / "make.py"))
KINDS = ("qwen2_5_vl", "qwen3_vl", "llava")
IMAGE, VIDEO = 21, 22  # of the tokenizer
_TEXT = {
    "vocab_size": 23,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 1,
    "patch_size": 4,
    "initializer_range": 0.2,
}
_OF_VIDEOS = "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 19, "vision_end_token_id": 20}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _model(kind: str) -> Any:
    if kind == "qwen2_5_vl":
        tower = {
            **_TOWER,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        }
        config = Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": _ROPE}, vision_config=tower, tie_word_embeddings=False, **_TOKENS
        )
        return Qwen2_5_VLForConditionalGeneration(config)
    if kind == "qwen3_vl":
        tower = {
            **_TOWER,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        }
        rope = {
            **_ROPE,
            "mrope_interleaved": True,
        }  # as released models have it; transformers interleaves in any case, vLLM does not
        config = Qwen3VLConfig(
            text_config={**_TEXT, "rope_parameters": rope}, vision_config=tower, tie_word_embeddings=True, **_TOKENS
        )
        return Qwen3VLForConditionalGeneration(config)
    tower = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = LlavaConfig(
        vision_config=tower, text_config=Qwen2Config(**_TEXT), image_token_index=IMAGE, tie_word_embeddings=False
    )
    return LlavaForConditionalGeneration(config)


def write_model(path: Path, kind: str, seed: int = 7) -> Path:
    """Write a random model, its tokenizer and its image processor; return its directory."""
    torch.manual_seed(seed)
    _model(kind).save_pretrained(path)
    tokenizer = MADE["make_tokenizer"]()
    tokenizer.chat_template = tokenizer.chat_template.replace("{% else %}{{ part", f"{_OF_VIDEOS}{{% else %}}{{{{ part")
    tokenizer.save_pretrained(path)
    if kind == "llava":
        size = {"height": 16, "width": 16}
        entries = {"image_processor_type": "CLIPImageProcessor", "size": size, "crop_size": size}
        (path / "preprocessor_config.json").write_text(json.dumps(entries))
        processor = {"image_token": "<|image_pad|>", "patch_size": 8, "vision_feature_select_strategy": "default"}
        (path / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", **processor}))
    else:
        MADE["make_processor"]().save_pretrained(path)
        largest = {"qwen2_5_vl": 24 * 24, "qwen3_vl": 24 * 24 * 8}[kind]  # of a frame, or of all
        entries = {"size": {"shortest_edge": 64, "longest_edge": largest}}
        (path / "video_preprocessor_config.json").write_text(json.dumps(entries))
    return path


def drawn(seed: int, width: int = 24, height: int = 24) -> bytes:
    """Return a file with shapes, of this size."""
    image = MADE["draw_row"](random.Random(seed))[0].resize((width, height))
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def asks(*seeds: int, text: str = "count: red") -> list[dict[str, Any]]:
    """Return a message that shows the images of these seeds, of several sizes, and asks."""
    images = [drawn(seed, 24 if seed % 2 else 16, 24) for seed in seeds]
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def plays(count: int, fps: float = 2.0, first: int = 1) -> dict[str, Any]:
    """Return a part with a video of so many drawn frames."""
    return {"type": "video", "video": [drawn(first + at) for at in range(count)], "fps": fps}


def make_rows(model: Path, *shown: tuple[int, ...]) -> list[Row[torch.Tensor]]:
    """Return a sample for each tuple of images' seeds, with two trained tokens behind the prompt; three or more are a video, and then an image."""
    pretrained = Pretrained(str(model))
    template = ChatTurns(load_tokenizer(pretrained, ChatTemplateConfig()), {}, reader=ImageReader.of(pretrained))
    found = []
    for seeds in shown:
        asked = asks(*seeds) if seeds else [{"role": "user", "content": "count: red"}]
        if len(seeds) > 2:
            asked[0]["content"][:-2] = [plays(len(seeds) - 1, first=seeds[0])]
        messages = with_images(asked)
        context = template.opening(messages)
        ids = torch.tensor([*context.token_ids, 7, 1])
        mask, zeros = torch.zeros(len(ids)), torch.zeros(len(ids))
        mask[-2:] = 1
        tensors = {name: torch.from_numpy(array) for name, array in named_tensors(context.images).items()}
        found.append(Row(ids, mask, zeros, zeros.int(), zeros, "stop", tensors=tensors))
    return found
