"""Kinds of pipelines that make videos: Sana's and Wan's, both with the autoencoder of Wan 2.1 or 2.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcrl.data.pipelines.kinds import Conditions, PipelineKind, Sana, as_bytes, as_floats, divided
from hpcrl.errors import DataError

if TYPE_CHECKING:
    import torch


class _Videos(PipelineKind):
    """Latents are of one frame, and of each few frames that follow; their means and deviations are in the autoencoder's config.json."""

    videos = True

    def latent_shape(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any], size: Sequence[int], frames: int
    ) -> tuple[int, ...]:
        if (name := vae.get("_class_name")) != "AutoencoderKLWan":
            raise DataError(
                f"trainer.policy.model.path: the autoencoder of its videos is a {name}; AutoencoderKLWan alone is known"
            )
        time, space = vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8)
        if (frames - 1) % time:
            raise DataError(
                f"trainer.policy.diffusers.train_frames: expected, as of inference_frames, 1 more than a multiple of {time}, the frames that one of "
                f"latents stands for, found {frames}"
            )
        edges = divided(size, space, transformer["patch_size"][-1])
        return (transformer["in_channels"], (frames - 1) // time + 1, *edges)

    def decode(self, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = pipeline.vae
        mean, deviation = _statistics(vae, latents)
        return as_bytes(vae.decode((latents * deviation + mean).to(vae.dtype), return_dict=False)[0])

    def latents(self, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        vae = pipeline.vae
        found = vae.encode(as_floats(pixels, vae.dtype)).latent_dist.mode()
        mean, deviation = _statistics(vae, found)
        return (found - mean) / deviation


class SanaVideo(_Videos, Sana):
    """Sana, for videos."""

    def velocity(self, transformer: Any, x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        found = transformer(
            x,
            encoder_hidden_states=conditions["prompt_embeds"],
            encoder_attention_mask=conditions["prompt_mask"],
            timestep=t * 1000,
            return_dict=False,
        )[0].float()
        return found[:, : x.shape[1]]


class Wan(_Videos):
    """Wan 2.1, and what has its one transformer."""

    def check(self, index: Mapping[str, Any]) -> None:
        if (index.get("transformer_2") or [None])[-1] is not None or index.get("expand_timesteps"):
            raise DataError(
                "trainer.policy.model.path: a Wan of two transformers, or with noise levels of each token (Wan 2.2), cannot be trained; use one of Wan 2.1"
            )

    def encode(self, pipeline: Any, prompts: Sequence[str], longest: int) -> Conditions:
        embeds, _ = pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=longest,
            device=pipeline.text_encoder.device,
        )
        return {"prompt_embeds": embeds}

    def velocity(self, transformer: Any, x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        return transformer(
            hidden_states=x,
            timestep=t * 1000,
            encoder_hidden_states=conditions["prompt_embeds"],
            return_dict=False,
        )[0].float()

    def idle_conditions(self, transformer: Mapping[str, Any]) -> Conditions:
        import torch

        return {"prompt_embeds": torch.zeros(1, 1, transformer["text_dim"])}


def _statistics(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of each channel of latents, as these broadcast."""
    import torch

    found = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    mean, deviation = (value.to(latents) for value in found)
    return mean, deviation
