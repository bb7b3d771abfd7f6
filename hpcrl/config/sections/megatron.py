"""Sections `trainer.policy.megatron_config` and `trainer.ref.megatron_config`: Megatron-core's parallelism and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def _transformer_defaults() -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _optimizer_defaults() -> dict[str, Any]:
    return {
        "overlap_cpu_optimizer_d2h_h2d": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
    }


@dataclass(frozen=True, kw_only=True)
class MegatronModelConfig:
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type in which the model computes and its gradients are; with bf16 the optimizer keeps fp32 copies of what it trains."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices; above 1 also splits activations along the sequence."""

    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers."""

    context_parallel_size: int = 1
    """Ranks that share the tokens of a sample; above 1 needs trainer.use_sample_packing."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts; with tensor and pipeline parallelism of the experts a divisor of all ranks."""

    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert's matrices; unset: tensor_model_parallel_size. Fewer than those need expert_model_parallel_size above 1."""

    pipeline_schedule: Literal["1F1B", "Interleaved1F1B"] = "1F1B"
    """Order of forward and backward passes in the pipeline: each rank has one stage, or (Interleaved1F1B) several."""

    pipeline_layers_per_stage: int | None = None
    """Layers per virtual stage, of which each rank has several; with Interleaved1F1B, which needs it, only."""

    pipeline_dynamic_shape: bool = False
    """Let micro-batches of one pipeline step differ in length."""

    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """Megatron-core's way to bring tokens to their experts."""

    moe_router_load_balancing_type: str = "none"
    """Megatron-core's scheme that keeps experts equally busy; none: no auxiliary loss."""

    moe_grouped_gemm: bool = True
    """Multiply all experts of a rank in one kernel."""

    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    """How the router turns logits into scores; unset: the model's own way."""

    moe_router_enable_expert_bias: bool | None = None
    """Let a bias of the router balance the experts; unset: the model's own way."""

    transformer_config_kwargs: dict[str, Any] = field(default_factory=_transformer_defaults)
    """Further fields of Megatron-core's TransformerConfig; given keys replace single defaults."""

    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Replaces entries of the model's config.json, as model_config_kwargs beside this section does with FSDP2."""


@dataclass(frozen=True, kw_only=True)
class MegatronDDPConfig:
    grad_reduce_in_fp32: bool = True
    """Accumulate and sum gradients in fp32."""

    overlap_grad_reduce: bool = False
    """Sum gradients over ranks during backward."""

    overlap_param_gather: bool = False
    """Gather parameters during forward."""

    average_in_collective: bool = True
    """Average gradients inside the collective instead of scaling before it."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(MegatronModelConfig):
    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)

    lora_type: Literal["lora", "canonical_lora"] = "lora"
    """How adapters of policy and critic lie in Megatron-core's matrices: with one first matrix for q, k and v, and one for gate and up; or (canonical_lora) one each, as with FSDP2."""

    optimizer_config_kwargs: dict[str, Any] = field(default_factory=_optimizer_defaults)
    """Further fields of Megatron-core's OptimizerConfig; given keys replace single defaults and win over optimizer_config."""

    empty_cuda_cache: bool | None = None
    """Empty the CUDA cache between backward and the optimizer's step; unset: Megatron-core's choice."""
