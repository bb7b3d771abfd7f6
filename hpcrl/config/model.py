"""Sections `trainer.policy` and `trainer.ref`: the models, how they are sharded and optimized."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcrl.config.location import Location


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: Location
    """Directory or hub id of a model in Hugging Face format."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = 1e-6
    """Learning rate of AdamW after the warm-up."""

    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of AdamW's first and second moment."""

    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW."""

    max_grad_norm: float = 1.0
    """Bound on the norm of all gradients together; 0 or less: no clipping."""

    num_warmup_steps: int = 0
    """Optimizer steps (mini-batches) over which the learning rate rises linearly to lr."""

    scheduler: Literal["constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step."""


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionConfig:
    param_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of parameters and activations in forward and backward; the optimizer keeps fp32."""

    reduce_dtype: Literal["bf16", "fp32"] = "fp32"
    """Type in which gradients are summed over ranks."""


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory outside forward and backward."""

    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again in backward: less memory, more traffic."""

    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    model: ModelConfig

    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)

    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass(frozen=True, kw_only=True)
class RefModelConfig:
    path: Location | None = None
    """Model that the KL term compares with; unset: the policy's initial model."""


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    model: RefModelConfig = field(default_factory=RefModelConfig)
