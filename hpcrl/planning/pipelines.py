"""What policies that are no language models need of each rank's memory, as far as it is known: weights, gradients and optimizer."""

from __future__ import annotations

from typing import Any

import torch

from hpcrl.config import Config, trainer_ranks
from hpcrl.config.families import trained_steps, trains_by_nft
from hpcrl.planning.devices import GIB
from hpcrl.planning.memory import BYTES, Weight, fsdp_state
from hpcrl.trainer.backends.actions.policy import action_source
from hpcrl.trainer.backends.diffusion.model import transformer_source
from hpcrl.trainer.models.trained import mark_trained


def describe_pipeline(config: Config) -> tuple[list[str], int]:
    """Return lines about the policy's transformer, and the bytes that a rank needs of it, activations not counted.

    Raises:
        DataError: the pipeline cannot be loaded, or does not have what the configuration names.
        RunError: diffusers is not installed here.
    """
    trainer, source = config.trainer, transformer_source(config.trainer)
    settings = trainer.policy.diffusers
    model = source.empty(torch.float32, "")
    latents = " x ".join(map(str, source.pipeline.latent_shape(settings.train_frames)))
    kind = "DiffusionNFT" if trains_by_nft(trainer) else "Flow-GRPO"
    of_model, memory, size = _of_trainer(config, model, copies=trains_by_nft(trainer) + settings.ema.enable)
    lines = [
        f"policy: {type(model).__name__} of {source}, {of_model}",
        f"  {kind}, {trained_steps(settings)} of {settings.sample.num_steps} denoising steps of each sample, latents of {latents}",
        memory,
        "engine: the transformer, its text encoders and VAE; their memory is not estimated",
    ]
    return lines, size


def describe_actions(config: Config) -> tuple[list[str], int]:
    """Return lines about a policy that moves robots by a flow, and the bytes that a rank needs of it, activations not counted.

    Raises:
        DataError: the model cannot be loaded, or does not have what the configuration names.
    """
    source, settings = action_source(config.trainer), config.vla.pi05
    model = source.empty(torch.float32, "")
    of_model, memory, size = _of_trainer(config, model, copies=0)
    sizes = model.architecture
    lines = [
        f"policy: {type(model).__name__} of {source}, {of_model}",
        f"  {settings.noise_method}, {settings.num_steps} steps from noise to a chunk of {sizes.chunk_size} actions with {sizes.action_dim} numbers",
        memory,
        "engine: the same model; its memory is not estimated",
    ]
    return lines, size


def _of_trainer(config: Config, model: Any, copies: int) -> tuple[str, str, int]:
    """Return what is told of a model that is trained: its parameters, its memory, and that in bytes of a rank.

    Args:
        copies: of what is trained, beside it.
    """
    policy, ranks = config.trainer.policy, trainer_ranks(config.trainer)
    mark_trained(model, policy, torch.float32)
    weights = [Weight(name, tuple(each.shape), each.requires_grad) for name, each in model.named_parameters()]
    trained = sum(weight.count for weight in weights if weight.trained)
    everything = sum(weight.count for weight in weights)
    precision = policy.fsdp_config.mixed_precision
    frozen = precision.param_dtype if policy.model.lora.rank else precision.master_dtype
    need = fsdp_state(weights, ranks, precision.master_dtype, frozen_dtype=frozen)
    kept = copies * trained * BYTES[precision.master_dtype] // ranks
    parts = {"weights": need.weights + kept, "gradients and optimizer": need.gradients + need.optimizer}
    told = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in parts.items())
    memory = f"  memory of each rank, in GiB, for one copy of the parameters: {told}; activations are not estimated"
    return f"{everything:,} parameters, {everything - trained:,} of them frozen", memory, sum(parts.values())
