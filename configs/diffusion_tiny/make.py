"""Makes what configs/diffusion_tiny.toml and diffusion_sft_tiny.toml start from: a tiny Stable Diffusion 3 with random weights, prompts and pictures.

    python configs/diffusion_tiny/make.py [FOLDER]

All parts are real ones of diffusers and transformers, made small: a transformer of two blocks, a VAE that makes 32 x 32 pixels of 8 x 8
latents, and two CLIP text encoders; the third one, T5, is left out, as diffusers allows. FOLDER (this one unless told otherwise) receives
model/ and data/; everything comes from fixed seeds.
"""

from __future__ import annotations

import colorsys
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

diffusers: Any = import_module("diffusers")  # its names are made when they are asked for

SUBJECTS = ("sunset", "forest", "ocean", "city", "desert", "meadow", "mountain", "river")
STYLES = ("painting", "photo", "sketch", "poster")
START, END = "<|startoftext|>", "<|endoftext|>"
WIDTH = 32


def make_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer with one token per letter."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [START, END, *letters, *(f"{letter}</w>" for letter in letters)]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=END,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        model_max_length=32,
    )


def make_encoder(vocabulary: int, seed: int) -> CLIPTextModelWithProjection:
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config).eval()


def make_pipeline(seed: int = 0) -> Any:
    """Return the pipeline. The random VAE is scaled so that latents from N(0, 1) become colours all over the range."""
    tokenizer = make_tokenizer()
    encoders = [make_encoder(len(tokenizer), seed + at) for at in range(2)]
    torch.manual_seed(seed)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=8,
    )
    vae = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=32,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(3.0)
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def write_prompts(path: Path, prompts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def write_pictures(path: Path, prompts: list[str]) -> None:
    """Write rows of a prompt and a picture: a colour for each subject, darker to a side for each style."""
    folder = path.parent / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    rows = list[str]()
    for prompt in prompts:
        style, _, subject = prompt.partition(" of a ")
        hue = SUBJECTS.index(subject) / len(SUBJECTS)
        colour = np.array(colorsys.hsv_to_rgb(hue, 1.0, 1.0))
        shade = np.rot90(np.linspace(0.3, 1.0, 32)[None, :, None].repeat(32, 0), STYLES.index(style))
        name = f"{prompt.replace(' ', '_')}.png"
        Image.fromarray((shade * colour * 255).astype(np.uint8)).save(folder / name)
        rows.append(json.dumps({"prompt": prompt, "images": f"pictures/{name}"}) + "\n")
    path.write_text("".join(rows))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_pipeline().save_pretrained(folder / "model")
    prompts = [f"{style} of a {subject}" for subject in SUBJECTS for style in STYLES]
    write_prompts(folder / "data/train.jsonl", prompts[4:])
    write_prompts(folder / "data/validation.jsonl", prompts[:4])
    write_pictures(folder / "data/pictures_train.jsonl", prompts[4:])
    write_pictures(folder / "data/pictures_validation.jsonl", prompts[:4])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
