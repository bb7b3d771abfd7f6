"""The transformer of a diffusion pipeline as a trainable model: its output is the velocity of a flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from hpcrl.config.sections.diffusers import DiffusersConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.families.diffusion.pipelines.kinds import Conditions, PipelineKind
from hpcrl.families.diffusion.pipelines.source import TRANSFORMER, PipelineSource
from hpcrl.trainer.backends.fsdp.model import PackedModel
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.trainable import mark_trained


@dataclass(frozen=True, kw_only=True)
class TransformerSource(ModelSource):
    """The transformer of a pipeline.

    Attributes:
        diffusers: trainer.policy.diffusers.
    """

    diffusers: DiffusersConfig

    @property
    def pipeline(self) -> PipelineSource:
        return PipelineSource(self, self.diffusers)

    def empty(self, dtype: torch.dtype, attention: str) -> Any:  # noqa: ARG002
        """Return the transformer without weights, on the meta device; arguments and errors as of ModelSource."""
        return _as_policy(self.pipeline.empty_transformer().to(dtype))

    def whole(self, dtype: torch.dtype, attention: str) -> Any:  # noqa: ARG002
        """Return the transformer with its weights, on the CPU; arguments and errors as of ModelSource."""
        pipeline = self.pipeline
        try:
            made = pipeline.transformer_class().from_pretrained(str(pipeline.folder / TRANSFORMER), dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise pipeline.not_a_pipeline(error) from error
        return _as_policy(made)

    def stored_dtype(self) -> torch.dtype | None:
        found = None
        for file in sorted((self.pipeline.folder / TRANSFORMER).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    kind = opened.get_slice(name)[:0].dtype
                    found = kind if found is None else torch.promote_types(found, kind)
        return found

    def _named_dtype(self) -> None:
        return None


def transformer_source(trainer: TrainerConfig) -> TransformerSource:
    """Return the source of the trained transformer."""
    return TransformerSource(
        **vars(trainer.policy.model.pretrained), role="trainer.policy", diffusers=trainer.policy.diffusers
    )


def _as_policy(transformer: Any) -> Any:
    """Return a transformer of diffusers with transformers' methods that backends expect: it has neither embedding nor head."""

    def nothing(*_: Any) -> None:
        return None

    def checkpointing(_options: Any, _every: int) -> None:
        transformer.enable_gradient_checkpointing()

    for name in ("get_input_embeddings", "get_output_embeddings", "tie_weights"):
        setattr(transformer, name, nothing)
    transformer.gradient_checkpointing_enable = checkpointing
    return transformer


class DiffusionModel(PackedModel):
    """A transformer that gives velocities.

    Args:
        dtype: in which it computes.
        guidance: weight of classifier-free guidance, where conditions of the empty prompt are given.
    """

    def __init__(
        self, transformer: Any, forward: ForwardConfig, *, kind: PipelineKind, dtype: torch.dtype, guidance: float
    ) -> None:
        super().__init__(transformer, forward)
        self._kind, self._dtype, self._guidance = kind, dtype, guidance

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, given: Conditions, free: Conditions | None = None
    ) -> torch.Tensor:
        """Return the velocity [N, ...] float32 at latents x [N, ...] of noise levels t [N]: with `free`, that with guidance (arXiv:2207.12598)."""
        if free is None:
            return self._kind.velocity(self.model, x.to(self._dtype), t, self._cast(given))
        both = {name: torch.cat([free[name], value]) for name, value in given.items()}
        x, t = torch.cat([x, x]), torch.cat([t, t])
        unconditional, conditional = self._kind.velocity(self.model, x.to(self._dtype), t, self._cast(both)).chunk(2)
        return unconditional + self._guidance * (conditional - unconditional)

    def _cast(self, conditions: Conditions) -> Conditions:
        return {
            name: value.to(self._dtype) if value.is_floating_point() else value for name, value in conditions.items()
        }


def diffusion_flops(trainer: TrainerConfig) -> ModelFlops:
    """Return the operations of training a denoising step: each patch of the latents is multiplied with all parameters. Attention is not
    counted."""
    source = transformer_source(trainer)
    model = source.empty(torch.float32, "")
    mark_trained(model, trainer.policy, torch.float32)
    _, *edges = source.pipeline.latent_shape(trainer.policy.diffusers.train_frames)
    patch = source.pipeline.patch
    patches = 1
    for edge in edges[-2:]:
        patches *= edge // patch
    for edge in edges[:-2]:
        patches *= edge
    frozen = not all(parameter.requires_grad for parameter in model.parameters())
    return ModelFlops(0.0, patches * sum(each.numel() for each in model.parameters()), 0, frozen_head=frozen)
