"""What a diffusion policy needs of each rank's memory, as far as it is known: weights, gradients and optimizer of its transformer."""

from __future__ import annotations

import torch

from hpcrl.config import Config, trainer_ranks
from hpcrl.config.families import trained_steps, trains_by_nft
from hpcrl.planning.devices import GIB
from hpcrl.planning.memory import BYTES, Weight, fsdp_state
from hpcrl.trainer.backends.diffusion.model import transformer_source
from hpcrl.trainer.models.trained import mark_trained


def describe_pipeline(config: Config) -> tuple[list[str], int]:
    """Return lines about the policy's transformer, and the bytes that a rank needs of it, activations not counted.

    Raises:
        DataError: the pipeline cannot be loaded, or does not have what the configuration names.
        RunError: diffusers is not installed here.
    """
    trainer, source = config.trainer, transformer_source(config.trainer)
    policy, settings = trainer.policy, trainer.policy.diffusers
    model = source.empty(torch.float32, "")
    mark_trained(model, policy, torch.float32)
    weights = [Weight(name, tuple(each.shape), each.requires_grad) for name, each in model.named_parameters()]
    trained = sum(weight.count for weight in weights if weight.trained)
    everything = sum(weight.count for weight in weights)
    latents = " x ".join(map(str, source.pipeline.latent_shape(settings.train_frames)))
    kind = "DiffusionNFT" if trains_by_nft(trainer) else "Flow-GRPO"
    precision, ranks = policy.fsdp_config.mixed_precision, trainer_ranks(trainer)
    frozen = precision.param_dtype if policy.model.lora.rank else precision.master_dtype
    need = fsdp_state(weights, ranks, precision.master_dtype, frozen_dtype=frozen)
    copies = (trains_by_nft(trainer) + settings.ema.enable) * trained * BYTES[precision.master_dtype] // ranks
    parts = {"weights": need.weights + copies, "gradients and optimizer": need.gradients + need.optimizer}
    told = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in parts.items())
    lines = [
        f"policy: {type(model).__name__} of {source}, {everything:,} parameters, {everything - trained:,} of them frozen",
        f"  {kind}, {trained_steps(settings)} of {settings.sample.num_steps} denoising steps of each sample, latents of {latents}",
        f"  memory of each rank, in GiB, for one copy of the parameters: {told}; activations are not estimated",
        "engine: the transformer, its text encoders and VAE; their memory is not estimated",
    ]
    return lines, sum(parts.values())
