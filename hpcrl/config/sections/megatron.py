"""Sections `trainer.policy.megatron_config` and `trainer.ref.megatron_config`: Megatron-core's parallelism and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.effects import (
    OBJECTIVE,
    OTHER_FUNCTION,
    OTHER_MODEL,
    OTHER_REFERENCE,
    ROUNDING,
    SAME_NUMBERS,
    SPREAD,
    UPDATES,
)
from hpcrl.config.setting import COUNT, section, setting

_TRANSFORMER_DEFAULTS: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn"],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_schedule",
    "pipeline_layers_per_stage",
)
"""Settings that say how ranks share a model: those of a reference on the policy's ranks are the policy's."""


@dataclass(frozen=True, kw_only=True)
class _MegatronOptions:
    dtype: Literal["bf16", "fp32"] = setting("bf16", on_change=ROUNDING)
    """Type in which the model computes and its gradients are; with bf16 the optimizer keeps fp32 copies of what it trains."""

    pipeline_dynamic_shape: bool = setting(False, on_change=SAME_NUMBERS)
    """Let micro-batches of one pipeline step differ in length."""

    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = setting("alltoall", on_change=SAME_NUMBERS)
    """Megatron-core's way to bring tokens to their experts."""

    moe_router_load_balancing_type: str = setting("none", on_change=OBJECTIVE)
    """Megatron-core's scheme that keeps experts equally busy; none: no auxiliary loss."""

    moe_grouped_gemm: bool = setting(True, on_change=SAME_NUMBERS)
    """Multiply all experts of a rank in one kernel."""

    moe_router_score_function: Literal["softmax", "sigmoid"] | None = setting(None, on_change=OTHER_FUNCTION)
    """How the router turns logits into scores; unset: the model's own way."""

    moe_router_enable_expert_bias: bool | None = setting(None, on_change=OTHER_FUNCTION)
    """Let a bias of the router balance the experts; unset: the model's own way."""

    transformer_config_kwargs: dict[str, Any] = setting(_TRANSFORMER_DEFAULTS, on_change=OTHER_MODEL)
    """Further fields of Megatron-core's TransformerConfig; given keys replace single defaults."""

    model_config_kwargs: dict[str, Any] = setting({}, on_change=OTHER_MODEL)
    """Replaces entries of the model's config.json, as model_config_kwargs beside this section does with FSDP2."""


@dataclass(frozen=True, kw_only=True)
class MegatronModelConfig(_MegatronOptions):
    tensor_model_parallel_size: int = setting(1, range=COUNT)
    """Ranks that share each layer's matrices; above 1 also splits activations along the sequence."""

    pipeline_model_parallel_size: int = setting(1, range=COUNT)
    """Ranks that share the layers."""

    context_parallel_size: int = setting(1, range=COUNT)
    """Ranks that share the tokens of a sample; above 1 needs trainer.use_sample_packing."""

    expert_model_parallel_size: int = setting(1, range=COUNT)
    """Ranks that share the experts; with tensor and pipeline parallelism of the experts a divisor of all ranks."""

    expert_tensor_parallel_size: int | None = setting(None, range=COUNT)
    """Ranks that share each expert's matrices; unset: tensor_model_parallel_size. Fewer than those need expert_model_parallel_size above 1."""

    pipeline_schedule: Literal["1F1B", "Interleaved1F1B"] = "1F1B"
    """Order of forward and backward passes in the pipeline: each rank has one stage, or (Interleaved1F1B) several."""

    pipeline_layers_per_stage: int | None = setting(None, range=COUNT)
    """Layers per virtual stage, of which each rank has several; with Interleaved1F1B, which needs it, only."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share the computation of each sample."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def experts_tensor_size(self) -> int:
        """Ranks that share each expert's matrices; where it is not set: as many as other layers'."""
        own = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if own is None else own


_AS_POLICY = "unset: as the policy, whose ranks the reference shares; SkyRL's is 1"


@dataclass(frozen=True, kw_only=True)
class RefMegatronConfig(_MegatronOptions):
    """The reference's; a change of what it computes is one of the reference, not of the policy."""

    tensor_model_parallel_size: int | None = setting(None, range=COUNT, why=_AS_POLICY)
    """Ranks that share each of the reference's matrices; unset: as the policy, and on its ranks no other number."""

    pipeline_model_parallel_size: int | None = setting(None, range=COUNT, why=_AS_POLICY)
    """Ranks that share the reference's layers; unset: as the policy, and on its ranks no other number."""

    context_parallel_size: int | None = setting(None, range=COUNT, why=_AS_POLICY)
    """Ranks that share the tokens of a sample in the reference; unset: as the policy, and on its ranks no other number."""

    expert_model_parallel_size: int | None = setting(None, range=COUNT, why=_AS_POLICY)
    """Ranks that share the reference's experts; unset: as the policy, and on its ranks no other number."""

    expert_tensor_parallel_size: int | None = setting(None, range=COUNT)
    """Ranks that share each of the reference's experts; unset: as the policy, and on its ranks no other number."""

    pipeline_schedule: Literal["1F1B", "Interleaved1F1B"] | None = None
    """Order of passes in the reference's pipeline; unset: as the policy, and on its ranks no other."""

    pipeline_layers_per_stage: int | None = setting(None, range=COUNT)
    """Layers per virtual stage of the reference; unset: as the policy, and on its ranks no other number."""

    moe_router_load_balancing_type: str = setting("none", on_change=SPREAD)

    moe_router_score_function: Literal["softmax", "sigmoid"] | None = setting(None, on_change=OTHER_REFERENCE)

    moe_router_enable_expert_bias: bool | None = setting(None, on_change=OTHER_REFERENCE)

    transformer_config_kwargs: dict[str, Any] = setting(_TRANSFORMER_DEFAULTS, on_change=OTHER_REFERENCE)

    model_config_kwargs: dict[str, Any] = setting({}, on_change=OTHER_REFERENCE)

    def beside(self, policy: MegatronModelConfig) -> MegatronModelConfig:
        """Return the layout and options of the reference, where sizes that are not set are the policy's."""
        own = vars(self)
        policys = {name: getattr(policy, name) for name in LAYOUT if own[name] is None}
        return MegatronModelConfig(**own | policys)


@dataclass(frozen=True, kw_only=True)
class MegatronDDPConfig:
    grad_reduce_in_fp32: bool = setting(True, on_change=ROUNDING)
    """Accumulate and sum gradients in fp32."""

    overlap_grad_reduce: bool = False
    """Sum gradients over ranks during backward."""

    overlap_param_gather: bool = False
    """Gather parameters during forward."""

    average_in_collective: bool = True
    """Average gradients inside the collective instead of scaling before it."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(MegatronModelConfig):
    ddp_config: MegatronDDPConfig = section(MegatronDDPConfig, on_change=SAME_NUMBERS)

    lora_type: Literal["lora", "canonical_lora"] = setting("lora", on_change=OTHER_MODEL)
    """How adapters of policy and critic lie in Megatron-core's matrices. lora: one first matrix for q, k and v, and one for gate and up; canonical_lora: one each, as with FSDP2."""

    optimizer_config_kwargs: dict[str, Any] = setting(
        {
            "overlap_cpu_optimizer_d2h_h2d": False,
            "use_precision_aware_optimizer": False,
            "optimizer_cpu_offload": False,
            "optimizer_offload_fraction": 0.0,
        },
        on_change=UPDATES,
    )
    """Further fields of Megatron-core's OptimizerConfig; given keys replace single defaults and win over optimizer_config."""

    empty_cuda_cache: bool | None = setting(None, on_change=SAME_NUMBERS)
    """Empty the CUDA cache between backward and the optimizer's step; unset: Megatron-core's choice."""
