"""Kinds of pipelines that make videos: Sana's, Wan's and Cosmos', all with the autoencoder of Wan 2.1 or 2.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpcrl.errors import DataError
from hpcrl.families.diffusion.pipelines.kinds import Conditions, PipelineKind, Sana, as_bytes, as_floats, divided

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


class _ByEmbeddings(_Videos):
    """Video pipelines whose only condition is the prompt's embeddings."""

    def encode(self, pipeline: Any, prompts: Sequence[str], longest: int) -> Conditions:
        embeds, _ = pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=longest,
            device=pipeline.text_encoder.device,
        )
        return {"prompt_embeds": embeds}


class Wan(_ByEmbeddings):
    """Wan 2.1, and what has its one transformer."""

    def check(self, index: Mapping[str, Any]) -> None:
        if (index.get("transformer_2") or [None])[-1] is not None or index.get("expand_timesteps"):
            raise DataError(
                "trainer.policy.model.path: a Wan of two transformers, or with noise levels of each token (Wan 2.2), cannot be trained; use one of Wan 2.1"
            )

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


class Cosmos(_ByEmbeddings):
    """Cosmos-Predict2.5, conditioned by a prompt alone: no frames are given."""

    left_out = ("safety_checker",)

    def prepare(self) -> None:
        import torch
        from diffusers.models.transformers import transformer_cosmos

        def nearest(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
            return torch.nn.functional.interpolate(mask, size, mode=interpolation)

        module: Any = transformer_cosmos
        if not hasattr(module, "transforms"):
            # All that the transformer wants of torchvision is one call, which resizes a mask as torch does. torchvision is not required for it: no
            # build fits torch's for CPUs.
            module.transforms = SimpleNamespace(
                functional=SimpleNamespace(resize=nearest), InterpolationMode=SimpleNamespace(NEAREST="nearest")
            )

    def pipeline_class(self) -> Any:
        """Return the pipeline without its guardrails, a package with models of its own: hpcrl calls the pipeline's parts, and so never
        calls them."""
        from diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict import Cosmos2_5_PredictBasePipeline

        class Unguarded(Cosmos2_5_PredictBasePipeline):
            # with a default it would be loaded in any case
            def __init__(
                self, text_encoder: Any, tokenizer: Any, transformer: Any, vae: Any, scheduler: Any, safety_checker: Any
            ) -> None:
                super().__init__(
                    text_encoder, tokenizer, transformer, vae, scheduler, safety_checker=safety_checker or _Unchecked()
                )

        return Unguarded

    def latent_shape(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any], size: Sequence[int], frames: int
    ) -> tuple[int, ...]:
        channels = transformer["in_channels"] - 1  # the last one marks given frames
        return super().latent_shape({**transformer, "in_channels": channels}, vae, size, frames)

    def velocity(self, transformer: Any, x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        count, _, frames, height, width = x.shape
        return transformer(
            hidden_states=x,
            condition_mask=x.new_zeros(count, 1, frames, height, width),
            padding_mask=x.new_zeros(1, 1, height, width),
            timestep=t.view(-1, 1, 1, 1, 1).expand(count, 1, frames, 1, 1),
            encoder_hidden_states=conditions["prompt_embeds"],
            return_dict=False,
        )[0].float()

    def idle_conditions(self, transformer: Mapping[str, Any]) -> Conditions:
        import torch

        width = "crossattn_proj_in_channels" if transformer.get("use_crossattn_projection") else "text_embed_dim"
        return {"prompt_embeds": torch.zeros(1, 1, transformer[width])}


class _Unchecked:
    """Stands where Cosmos' pipelines want guardrails."""


def _statistics(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of each channel of latents, as these broadcast."""
    import torch

    found = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    mean, deviation = (value.to(latents) for value in found)
    return mean, deviation
