"""Our sampler paints what diffusers' own pipelines paint, with guidance; pipelines that are none, or unknown, are refused."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2Model

from hpcrl.config.sections.diffusers import DiffusersConfig, DiffusionSamplingConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.pipelines.samples import CLEAN
from hpcrl.data.pipelines.source import PipelineSource
from hpcrl.errors import DataError
from hpcrl.rollout.engines.diffusion.sampler import Sampler
from tests.paths import CONFIGS

diffusers: Any = pytest.importorskip("diffusers")

TINY = CONFIGS / "diffusion_tiny"
STEPS, GUIDANCE, PROMPT = 9, 2.5, "photo of a city"


def settings(solver: Any) -> DiffusersConfig:
    sample = DiffusionSamplingConfig(
        num_steps=STEPS,
        guidance_scale=GUIDANCE,
        solver=solver,
        deterministic_sampling=True,
    )
    return DiffusersConfig(
        enable=True, dtype="float32", inference_size=[32, 32], max_prompt_length=16, sample=sample, train_frames=1
    )


def write_sana(folder: Path) -> Path:
    """Write a tiny Sana with random weights."""
    tokenizer = runpy.run_path(str(TINY / "make.py"))["make_tokenizer"]()
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
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
    pipeline: Any = diffusers.SanaPipeline(
        tokenizer, Gemma2Model(config).eval(), vae.eval(), transformer.eval(), scheduler
    )
    pipeline.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "solver"), [("stable_diffusion_3", "dpm1"), ("sana", "dpm2")])
def test_a_sample_is_what_the_pipeline_itself_paints(kind: str, solver: str, tmp_path: Path) -> None:
    folder = TINY / "model" if kind == "stable_diffusion_3" else write_sana(tmp_path / "sana")
    source = PipelineSource(Pretrained(str(folder)), settings(solver))
    sampler = Sampler(source, torch.float32, torch.device("cpu"))
    (painted,) = sampler.paint(PROMPT, [11], "train", 4)
    shape = source.latent_shape(1)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(11))
    options: dict[str, Any] = {"max_sequence_length": 16, "output_type": "latent"}
    if kind == "sana":
        options |= {"complex_human_instruction": None, "use_resolution_binning": False}
    theirs = sampler._pipeline(
        PROMPT, height=32, width=32, num_inference_steps=STEPS, guidance_scale=GUIDANCE, latents=noise[None], **options
    ).images
    torch.testing.assert_close(torch.from_numpy(painted.tensors[CLEAN]), theirs[0], rtol=1e-3, atol=1e-3)
    assert painted.tensors["image"].shape == (32, 32, 3)


def test_what_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    source = PipelineSource(Pretrained(str(tmp_path)), settings("dpm2"))
    with pytest.raises(DataError, match="cannot be loaded"):
        _ = source.kind
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KandinskyPipeline"}))
    with pytest.raises(DataError, match="is a KandinskyPipeline; the pipelines that can be trained are"):
        _ = source.kind
    odd = PipelineSource(Pretrained(str(TINY / "model")), DiffusersConfig(inference_size=[36, 32]))
    with pytest.raises(DataError, match="expected multiples of 8"):
        odd.latent_shape(1)
