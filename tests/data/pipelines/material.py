"""Tiny pipelines with random weights, of diffusers' own parts."""

from __future__ import annotations

import json
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    UMT5Config,
    UMT5EncoderModel,
)

from hpcrl.families.diffusion.pipelines.source import KINDS
from tests.paths import CONFIGS

diffusers: Any = import_module("diffusers")  # its names are made when they are asked for

TINY = CONFIGS / "diffusion_tiny"


def write_sana(folder: Path) -> Path:
    """Write a tiny Sana with random weights."""
    tokenizer, encoder = _tokenizer(), _gemma()
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2, num_cross_attention_heads=2,
        cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16, sample_size=8,
    )  # fmt: skip
    widths = (8, 16, 16)
    vae = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=8, encoder_block_out_channels=widths, decoder_block_out_channels=widths,
        encoder_layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1), encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
    )  # fmt: skip
    # with nine steps and hardly a shift the scheduler's noise levels are just above thousandths, to which it cuts what it tells the transformer
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.00001, algorithm_type="dpmsolver++"
    )
    pipeline: Any = diffusers.SanaPipeline(tokenizer, encoder, vae.eval(), transformer.eval(), scheduler)
    pipeline.save_pretrained(folder)
    return folder


def write_sana_video(folder: Path) -> Path:
    """Write a tiny Sana for videos: 4 times fewer frames, each of 8 times smaller latents."""
    tokenizer, encoder = _tokenizer(), _gemma()
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, num_cross_attention_heads=2,
        cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=16, sample_size=4,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
    pipeline: Any = diffusers.SanaVideoPipeline(tokenizer, encoder, _wan_vae(), transformer.eval(), scheduler)
    pipeline.save_pretrained(folder)
    return folder


def write_wan(folder: Path) -> Path:
    """Write a tiny Wan 2.1."""
    tokenizer = _tokenizer()
    torch.manual_seed(5)
    config = UMT5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
    pipeline: Any = diffusers.WanPipeline(
        tokenizer, UMT5EncoderModel(config).eval(), _wan_vae(), scheduler, transformer.eval()
    )
    pipeline.save_pretrained(folder)
    return folder


def write_cosmos(folder: Path) -> Path:
    """Write a tiny Cosmos-Predict2.5: a prompt is what all layers of a language model say of it, side by side."""
    tokenizer = _tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'][0]['text'] }}"
    torch.manual_seed(6)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "rope_parameters": rope,
    }  # fmt: skip
    tower = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    }
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower)).eval()
    KINDS["Cosmos2_5_PredictBasePipeline"].prepare()
    transformer = diffusers.CosmosTransformer3DModel(
        in_channels=5, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, text_embed_dim=16, adaln_lora_dim=8,
        extra_pos_embed_type=None, use_crossattn_projection=True, crossattn_proj_in_channels=32, encoder_hidden_states_channels=16,
    )  # fmt: skip
    parts = {"text_encoder": encoder, "tokenizer": tokenizer, "transformer": transformer.eval(), "vae": _wan_vae()}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
    for name, part in {**parts, "scheduler": scheduler}.items():
        part.save_pretrained(folder / name)
    libraries = {"text_encoder": "transformers", "tokenizer": "transformers"}
    index = {
        name: [libraries.get(name, "diffusers"), type(part).__name__]
        for name, part in {**parts, "scheduler": scheduler}.items()
    }
    whole = {
        "_class_name": "Cosmos2_5_PredictBasePipeline",
        "safety_checker": ["cosmos_guardrail", "CosmosSafetyChecker"],
        **index,
    }
    (folder / "model_index.json").write_text(json.dumps(whole))
    return folder


def _tokenizer() -> Any:
    return runpy.run_path(str(TINY / "make.py"))["make_tokenizer"]()


def _gemma() -> Gemma2Model:
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=len(_tokenizer()), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return Gemma2Model(config).eval()


def _wan_vae() -> Any:
    """Return an autoencoder whose pictures have all colours."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, num_res_blocks=1, dim_mult=[1, 1, 1, 1], latents_mean=[0.1, -0.1, 0.2, 0.0], latents_std=[1.5, 1.0, 0.8, 1.2]
    )  # fmt: skip
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(3.0)
    return vae.eval()
