"""Kinds of diffusers' pipelines: encoding of prompts, calls of the transformer, and decoding of latents.

All are flows: the transformer predicts the velocity from a sample to the noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hpcrl.errors import DataError

if TYPE_CHECKING:
    import torch

Conditions = dict[str, "torch.Tensor"]
"""Conditions of a prompt for the transformer, by name, [N, ...] each."""


class PipelineKind(ABC):
    """One kind.

    Attributes:
        vae_levels: the entry of the autoencoder's config.json that has one number for each of its levels, between which edges are halved.
        videos: whether it makes videos.
        left_out: parts of its pipelines that are not loaded.
    """

    vae_levels: ClassVar[str] = "block_out_channels"
    videos: ClassVar[bool] = False
    left_out: ClassVar[tuple[str, ...]] = ()

    def check(self, index: Mapping[str, Any]) -> None:  # noqa: B027 most kinds need no check
        """Raise DataError where a pipeline of this kind cannot be trained.

        Args:
            index: entries of its model_index.json.
        """

    def prepare(self) -> None:  # noqa: B027  most are ready
        """Prepare diffusers' transformer of this kind for use."""

    def pipeline_class(self) -> Any:
        """Return the class that loads a pipeline of this kind."""
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline

        return DiffusionPipeline

    @abstractmethod
    def encode(self, pipeline: Any, prompts: Sequence[str], longest: int) -> Conditions:
        """Return the transformer's conditions of prompts.

        Args:
            longest: tokens that a prompt may have; further ones are cut off.
        """

    @abstractmethod
    def velocity(self, transformer: Any, x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Return the velocity [N, ...] float32 at latents of noise levels t [N] in [0, 1]."""

    def latent_shape(
        self,
        transformer: Mapping[str, Any],
        vae: Mapping[str, Any],
        size: Sequence[int],
        frames: int,  # noqa: ARG002
    ) -> tuple[int, ...]:
        """Return the shape of one sample's latents.

        Args:
            transformer, vae: entries of their config.json.
            size: height and width in pixels.
            frames: of a video.
        """
        scale = 2 ** (len(vae[self.vae_levels]) - 1)
        return (transformer["in_channels"], *divided(size, scale, transformer["patch_size"]))

    @abstractmethod
    def decode(self, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
        """Return pictures [N, height, width, 3] or videos [N, frames, height, width, 3] uint8, on the CPU."""

    @abstractmethod
    def latents(self, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return latents of what `decode` returns, on the device of `pixels`: the most probable ones, where the autoencoder gives a distribution."""

    @abstractmethod
    def idle_conditions(self, transformer: Mapping[str, Any]) -> Conditions:
        """Return conditions of no prompt, [1, ...], of the right widths, for a rank without samples."""


class StableDiffusion3(PipelineKind):
    """Stable Diffusion 3 and 3.5."""

    def encode(self, pipeline: Any, prompts: Sequence[str], longest: int) -> Conditions:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            list(prompts),
            None,
            None,
            pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=longest,
        )
        return {"prompt_embeds": embeds, "pooled_embeds": pooled}

    def velocity(self, transformer: Any, x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        return transformer(
            hidden_states=x,
            timestep=t * 1000,
            encoder_hidden_states=conditions["prompt_embeds"],
            pooled_projections=conditions["pooled_embeds"],
            return_dict=False,
        )[0].float()

    def decode(self, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = pipeline.vae
        latents = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return as_bytes(vae.decode(latents, return_dict=False)[0])

    def latents(self, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        vae = pipeline.vae
        found = vae.encode(as_floats(pixels, vae.dtype)).latent_dist.mode()
        return (found - vae.config.shift_factor) * vae.config.scaling_factor

    def idle_conditions(self, transformer: Mapping[str, Any]) -> Conditions:
        import torch

        return {
            "prompt_embeds": torch.zeros(1, 1, transformer["joint_attention_dim"]),
            "pooled_embeds": torch.zeros(1, transformer["pooled_projection_dim"]),
        }


class Sana(PipelineKind):
    """Sana, for images."""

    vae_levels = "encoder_block_out_channels"

    def encode(self, pipeline: Any, prompts: Sequence[str], longest: int) -> Conditions:
        embeds, mask, _, _ = pipeline.encode_prompt(
            list(prompts),
            device=pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=longest,
            complex_human_instruction=None,
        )
        return {"prompt_embeds": embeds, "prompt_mask": mask.int()}

    def velocity(self, transformer: Any, x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        found = transformer(
            x,
            encoder_hidden_states=conditions["prompt_embeds"],
            encoder_attention_mask=conditions["prompt_mask"],
            timestep=t * 1000 * transformer.config.timestep_scale,
            return_dict=False,
        )[0].float()
        return found[:, : x.shape[1]]  # what follows, where there is more, is a variance that no sampler here uses

    def decode(self, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
        vae = pipeline.vae
        return as_bytes(vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0])

    def latents(self, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        vae = pipeline.vae
        return vae.encode(as_floats(pixels, vae.dtype)).latent * vae.config.scaling_factor

    def idle_conditions(self, transformer: Mapping[str, Any]) -> Conditions:
        import torch

        return {
            "prompt_embeds": torch.zeros(1, 1, transformer["caption_channels"]),
            "prompt_mask": torch.ones(1, 1, dtype=torch.int32),
        }


def divided(size: Sequence[int], scale: int, patch: int) -> list[int]:
    """Return the edges of latents, each pixel of which stands for `scale` ones of the picture. Raises DataError where patches of the transformer do not cover them."""
    step = scale * patch
    if wrong := [edge for edge in size if edge % step]:
        raise DataError(
            f"trainer.policy.diffusers.inference_size: expected multiples of {step}, which a patch of the transformer covers, found {wrong[0]}"
        )
    return [edge // scale for edge in size]


def as_bytes(images: torch.Tensor) -> torch.Tensor:
    """Return images [N, 3, height, width] from -1 to 1 as bytes, channels last."""
    import torch

    return ((images.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).cpu()


def as_floats(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes, channels last, as images or videos [N, 3, ...] from -1 to 1; the opposite of `as_bytes`."""
    return (pixels.to(dtype) / 127.5 - 1).movedim(-1, 1)
