"""OpenVLA's network: its files, its vision transformers beside transformers' own, its images, and what is sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.data.models.openvla.config import OpenVLAConfig
from hpcrl.data.models.openvla.model import VisionTransformer
from hpcrl.data.tokenizer import chat_template
from hpcrl.data.vision.openvla import OpenVLAImageProcessor
from hpcrl.trainer.backends.fsdp.sharding import units

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
TOWER: dict[str, Any] = {"hidden_size": 32, "depth": 3, "num_heads": 2, "mlp_size": 64, "patch_size": 4}
OPENVLA_7B = {
    "model_type": "openvla",
    "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
}


def test_files_have_the_names_of_openvla(reach: Path) -> None:
    names = set(load_file(reach / "model.safetensors"))
    assert {
        "language_model.lm_head.weight",
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "projector.fc1.weight",
        "projector.fc3.bias",
        "vision_backbone.featurizer.reg_token",
        "vision_backbone.featurizer.blocks.0.ls1.scale_factor",
        "vision_backbone.fused_featurizer.blocks.1.attn.qkv.bias",
        "vision_backbone.fused_featurizer.patch_embed.proj.weight",
    } <= names
    assert {name.split(".")[0] for name in names} == {"language_model", "projector", "vision_backbone"}


def test_the_configuration_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OPENVLA_7B))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, OpenVLAConfig)
    assert (config.image_token_id, config.vision_config.num_channels, config.vision_config.patch_size) == (32000, 6, 14)  # pyright: ignore
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["model.projector.fc1.weight"] == (4 * 2176, 2176)
    assert shapes["model.vision_backbone.featurizer.pos_embed"] == (1, 256, 1024)
    assert shapes["model.vision_backbone.fused_featurizer.blocks.25.mlp.fc1.weight"] == (4304, 1152)
    assert "model.vision_backbone.fused_featurizer.blocks.26.mlp.fc1.weight" not in shapes, "it is not computed"
    kinds = {type(unit).__name__ for unit in units(model, {})}
    assert kinds == {"OpenVLABlock", "LlamaDecoderLayer"}


def _copy(
    own: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], names: dict[str, str], parts: dict[str, str]
) -> None:
    """Fill `own` from transformers' weights: single ones by name, and those of blocks; q, k and v are one matrix in timm's."""
    for name, other in names.items():
        own[name].copy_(theirs[other].reshape(own[name].shape))
    for at in range(2):
        for name, other in parts.items():
            block = f"blocks.{at}.{name}"
            if name.startswith("attn.qkv"):
                three = [theirs[other.format(at, part)] for part in ("query", "key", "value")]
                own[block].copy_(torch.cat(three))
            else:
                own[block].copy_(theirs[other.format(at)])


@torch.no_grad()
def test_dinov2_is_that_of_transformers() -> None:
    torch.manual_seed(1)
    other = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES, mlp_ratio=2, num_register_tokens=3)).eval()
    for parameter in other.parameters():
        parameter.normal_(0, 0.3)
    theirs = other.state_dict()
    theirs["embeddings.position_embeddings"][:, 0] = 0  # timm's has none for the class token
    tower = VisionTransformer(16, **TOWER, registers=3, dinov2=True)
    layer = "encoder.layer.{}."
    parts = {f"norm{one}.{kind}": f"{layer}norm{one}.{kind}" for one in (1, 2) for kind in ("weight", "bias")}
    parts |= {f"mlp.fc{one}.{kind}": f"{layer}mlp.fc{one}.{kind}" for one in (1, 2) for kind in ("weight", "bias")}
    parts |= {f"ls{one}.scale_factor": f"{layer}layer_scale{one}.lambda1" for one in (1, 2)}
    parts |= {f"attn.qkv.{kind}": f"{layer}attention.attention.{{}}.{kind}" for kind in ("weight", "bias")}
    parts |= {f"attn.proj.{kind}": f"{layer}attention.output.dense.{kind}" for kind in ("weight", "bias")}
    names = {
        "cls_token": "embeddings.cls_token",
        "reg_token": "embeddings.register_tokens",
        "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
        "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    }
    own = tower.state_dict()
    _copy(own, theirs, names, parts)
    own["pos_embed"].copy_(theirs["embeddings.position_embeddings"][:, 1:])
    pixels = torch.randn(2, 3, 16, 16)
    expected = other(pixels, output_hidden_states=True).hidden_states[-2][:, 4:]
    torch.testing.assert_close(tower(pixels), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_siglip_is_that_of_transformers() -> None:
    torch.manual_seed(2)
    config = SiglipVisionConfig(**SIZES, intermediate_size=64, hidden_act="gelu")
    other = SiglipVisionModel(config).eval()
    for parameter in other.parameters():
        parameter.normal_(0, 0.3)
    theirs = {name.removeprefix("vision_model."): tensor for name, tensor in other.state_dict().items()}
    tower = VisionTransformer(16, **TOWER)
    layer = "encoder.layers.{}."
    parts = {f"norm{one}.{kind}": f"{layer}layer_norm{one}.{kind}" for one in (1, 2) for kind in ("weight", "bias")}
    parts |= {f"mlp.fc{one}.{kind}": f"{layer}mlp.fc{one}.{kind}" for one in (1, 2) for kind in ("weight", "bias")}
    parts |= {f"attn.proj.{kind}": f"{layer}self_attn.out_proj.{kind}" for kind in ("weight", "bias")}
    names = {
        "pos_embed": "embeddings.position_embedding.weight",
        "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
        "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
    }
    own = tower.state_dict()
    _copy(own, theirs, names, parts)
    for at in range(2):
        for kind in ("weight", "bias"):
            three = [theirs[f"encoder.layers.{at}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            own[f"blocks.{at}.attn.qkv.{kind}"].copy_(torch.cat(three))
    pixels = torch.randn(2, 3, 16, 16)
    expected = other(pixels, output_hidden_states=True).hidden_states[-2]
    torch.testing.assert_close(tower(pixels), expected, rtol=1e-4, atol=1e-4)


def test_images_are_resized_and_normalised_for_each_tower(tmp_path: Path) -> None:
    size = [3, 8, 8]
    processor = OpenVLAImageProcessor([[0.5] * 3, [0.0] * 3], [[0.5] * 3, [1.0] * 3], [size, size])
    processor.save_pretrained(tmp_path)
    again = OpenVLAImageProcessor.from_pretrained(str(tmp_path))
    assert again == processor
    image = Image.new("RGB", (40, 20), (255, 0, 51))
    pixels = again([image])["pixel_values"]
    assert pixels.shape == (1, 6, 8, 8)
    assert pixels[0, :, 3, 3] == pytest.approx(np.array([1, -1, -0.6, 1, 0, 0.2]), abs=1e-6)
    framed = Image.new("RGB", (8, 8), (0, 0, 0))
    framed.paste((255, 255, 255), (1, 1, 7, 7))
    cropped = OpenVLAImageProcessor.from_pretrained(str(tmp_path), center_crop=True)
    assert cropped([framed])["pixel_values"][0, 3].mean() > processor([framed])["pixel_values"][0, 3].mean()
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"means": [], "stds": [], "input_sizes": [], "image_resize_strategy": "letterbox"})
    )
    with pytest.raises(ValueError, match="letterbox"):
        OpenVLAImageProcessor.from_pretrained(str(tmp_path))


def test_its_chat_template(reach: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reach)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    parts = [{"type": "image"}, {"type": "text", "text": "Open the Drawer "}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}],
        chat_template=chat_template(ChatTemplateConfig(name_or_path="openvla")),
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<s><PAD>In: What action should the robot take to open the drawer?\nOut: "
