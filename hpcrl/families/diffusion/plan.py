"""Planning of pipelines: its function is that of hpcrl.planning.family.PlanFamily."""

from __future__ import annotations

import torch

from hpcrl.config import Config
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.families.diffusion.model import transformer_source
from hpcrl.families.diffusion.settings import trains_by_nft
from hpcrl.planning.activations import kept_bytes
from hpcrl.planning.whole_model import memory_line, memory_of_parameters
from hpcrl.trainer.models.forward import DTYPES
from hpcrl.trainer.models.trainable import mark_trained


def describe_policy(config: Config) -> tuple[list[str], dict[str, int]]:
    """Return lines about the policy's transformer, and the bytes that a rank needs of it, by what they hold."""
    trainer, source = config.trainer, transformer_source(config.trainer)
    settings = trainer.policy.diffusers
    model = source.empty(torch.float32, "")
    latents = " x ".join(map(str, source.pipeline.latent_shape(settings.train_frames)))
    kind = "DiffusionNFT" if trains_by_nft(trainer) else "Flow-GRPO"
    steps = f"{kind}, {settings.trained_steps} of {settings.sample.num_steps} denoising steps of each sample"
    if trainer.offline:
        steps = "flow matching, a noise level of each row"
    rows = passes(trainer)
    of_model, parts = memory_of_parameters(config, model, copies=trains_by_nft(trainer) + settings.ema.enable)
    parts["activations"] = rows * activations_of_a_pass(trainer)
    lines = [
        f"policy: {type(model).__name__} of {source}, {of_model}",
        f"  {steps}, latents of {latents}; {rows} passes of the transformer at a time",
        memory_line(parts),
    ]
    if trainer.offline:
        lines.append("  text encoders and VAE are on each rank too; their memory is not estimated")
    if config.has_engines:
        lines.append("engine: the transformer, its text encoders and VAE; their memory is not estimated")
    return lines, parts


def passes(trainer: TrainerConfig) -> int:
    """Return the rows of latents in one pass: the trained steps of a micro-batch's samples, twice with guidance."""
    settings = trainer.policy.diffusers
    of_sample = 1 if trainer.offline else settings.trained_steps
    guided = not trainer.offline and not trains_by_nft(trainer) and settings.sample.guidance_scale > 1
    return (trainer.micro_train_batch_size_per_gpu or 1) * of_sample * (2 if guided else 1)


def activations_of_a_pass(trainer: TrainerConfig) -> int:
    """Return the bytes of one row's activations until backward, with attention by a fused kernel; errors as of `describe_policy`."""
    source, settings = transformer_source(trainer), trainer.policy.diffusers
    dtype = DTYPES[trainer.policy.fsdp_config.mixed_precision.param_dtype]
    model, kind = source.empty(dtype, ""), source.pipeline.kind
    mark_trained(model, trainer.policy, dtype)
    with torch.device("meta"):
        x, t = torch.zeros(1, *source.pipeline.latent_shape(settings.train_frames), dtype=dtype), torch.zeros(1)
    idle = kind.idle_conditions(source.pipeline.transformer)
    longest = settings.max_prompt_length
    conditions = {
        # one token stands for a prompt in them
        name: (value.repeat_interleave(longest, 1) if value.shape[1] == 1 else value).to(
            "meta", dtype if value.is_floating_point() else None
        )
        for name, value in idle.items()
    }
    return kept_bytes(model, lambda: kind.velocity(model, x, t, conditions), recomputed=trainer.gradient_checkpointing)
