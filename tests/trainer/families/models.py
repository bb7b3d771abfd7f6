"""Tiny random models, one for each family that docs/models.md lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 32, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "max_position_embeddings": 128,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_WINDOW: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
_HYBRID: dict[str, Any] = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 4}


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    Attributes:
        kind: model_type in config.json.
        tells: what it has beside causal attention over all tokens, in the table.
        sizes: of the tiny one, beside SIZES.
        quick: its tests run in `make test`; those of others in `make faults`.
    """

    name: str
    kind: str
    tells: str = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    quick: bool = False


FAMILIES = [
    Family("Llama", "llama"),
    Family("Mistral", "mistral", "sliding window", {"sliding_window": 6}),
    Family("Mixtral", "mixtral", "experts", _LOCAL),
    Family("Qwen2", "qwen2"),
    Family("Qwen2-MoE", "qwen2_moe", "experts", _SHARED),
    Family("Qwen3", "qwen3", quick=True),
    Family("Qwen3-MoE", "qwen3_moe", "experts", _EXPERTS, quick=True),
    Family("Gemma", "gemma", "scaled embedding"),
    Family("Gemma 2", "gemma2", "sliding window, capped scores and logits, scaled embedding", {**_WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0}, quick=True),
    Family("Gemma 3", "gemma3_text", "sliding window, scaled embedding", {**_WINDOW, "query_pre_attn_scalar": 8}),
    Family("gpt-oss", "gpt_oss", "sinks, sliding window, experts", {**_WINDOW, **_LOCAL}, quick=True),
    Family("Phi-3", "phi3"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", "sliding window", _WINDOW),
    Family("GLM-4", "glm4"),
    Family("GLM-4.5", "glm4_moe", "experts", {**_ROUTED, "n_group": 1, "topk_group": 1}),
    Family("DeepSeek-V3", "deepseek_v3", "latent attention, experts", {**_ROUTED, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}),
    Family("Command R", "cohere", "scaled logits", {"logit_scale": 0.5}),
    Family("Command R7B", "cohere2", "sliding window, scaled logits", {**_WINDOW, "logit_scale": 0.5}),
    Family("Granite 3", "granite", "scaled embedding, residuals and logits", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    Family("SmolLM3", "smollm3"),
    Family("Seed-OSS", "seed_oss", "dropout in its own code", quick=True),
    Family("StarCoder2", "starcoder2", "sliding window", {"sliding_window": 6}),
    Family("Mamba", "mamba", "state", {"state_size": 4}),
    Family("Falcon Mamba", "falcon_mamba", "state", {"state_size": 4}),
    Family("Mamba 2", "mamba2", "state", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}, quick=True),
    Family("Jamba", "jamba", "state, experts", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    Family("Bamba", "bamba", "state", {"attn_layer_indices": [1], "mamba_expand": 2, **_MAMBA2}),
    Family("Zamba", "zamba", "state, layers that share weights", {**_HYBRID, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_hidden_size": 64, "attention_head_dim": 16, "use_mamba_kernels": False}),
    Family("Zamba 2", "zamba2", "state, layers that share weights", {**_HYBRID, "hybrid_layer_ids": [1, 3], "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 4, "num_mem_blocks": 1, "adapter_rank": 4}),
    Family("Falcon-H1", "falcon_h1", "state, scaled logits", {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5, **_MAMBA2}),
    Family("Nemotron-H", "nemotron_h", "state", {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "chunk_size": 4}),
    Family("Granite 4", "granitemoehybrid", "state, scaled logits", {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48, "logits_scaling": 4.0, **_MAMBA2}),
    Family("Qwen3-Next", "qwen3_next", "state, experts", {**_SHARED, **_DELTA}, quick=True),
    Family("Qwen3.5", "qwen3_5_text", "state", _DELTA),
    Family("Qwen3.5-MoE", "qwen3_5_moe_text", "state, experts", {**_SHARED, **_DELTA}),
    Family("OLMo Hybrid", "olmo_hybrid", "state", _DELTA),
    Family("LFM2", "lfm2", "state", {**_CONV, "block_auto_adjust_ff_dim": False}, quick=True),
    Family("LFM2-MoE", "lfm2_moe", "state, experts", {**_EXPERTS, **_CONV, "num_dense_layers": 1}),
    Family("MiniMax", "minimax", "state of another kind, experts", {**_LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 4}),
    Family("StableLM", "stablelm"),
]  # fmt: skip


def config_of(family: Family) -> Any:
    """Return the configuration of the tiny model."""
    return AutoConfig.for_model(family.kind, **{**SIZES, **family.sizes})


def model_of(family: Family, attention: str, config: Any = None) -> PreTrainedModel:
    """Return the tiny model, or one of another configuration, in float32; its parameters are random where a new model has ones and zeros."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config or config_of(family), attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def write_model(family: Family, path: Path) -> Path:
    """Write the tiny model as others have theirs on disk; return its directory."""
    model_of(family, "eager").save_pretrained(path)
    return path
