"""Tiny models of each family as files, and GPTModels of megatron's local layers for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.distributed import World
from tests.trainer.backends.megatron.leave import leave_groups

VOCABULARY = 131

SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-tied": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama": (LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-tied": (LlamaConfig, {"rope_parameters": _LINEAR, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen3-moe": (Qwen3MoeConfig, {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        Qwen3MoeConfig,
        {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen2-moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}),
}


def config_of(name: str) -> PreTrainedConfig:
    kind, changes = CONFIGS[name]
    return kind(**SHARED | changes)


def write_model(name: str, path: Path) -> None:
    """Write the model with random weights, biases and norms too, in several files."""
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config_of(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path, max_shard_size="40KB")


def start(layout: dict[str, int], world: World) -> None:
    """Make megatron's groups of ranks."""
    leave_groups(world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=layout.get("vpp"),
        context_parallel_size=layout.get("cp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp"),
    )
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def transformer_config(architecture: Architecture, layout: dict[str, int]) -> TransformerConfig:
    # megatron's own attention refuses context parallelism, which changes no parameter
    return TransformerConfig(
        **architecture.transformer,
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=layout.get("vpp"),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp"),
        sequence_parallel=False,
        pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        use_cpu_initialization=True,
    )


def build(architecture: Architecture, layout: dict[str, int]) -> list[GPTModel]:
    """Return this rank's pipeline stages, with random weights."""
    config, stages = transformer_config(architecture, layout), layout.get("vpp")
    tensor = layout.get("tp", 1)
    chunks = []
    for stage in range(stages or 1):
        virtual = stage if stages else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual)
        chunk = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual),  # pyright: ignore[reportArgumentType]
            vocab_size=-(-architecture.vocab_size // tensor) * tensor,
            max_sequence_length=architecture.max_positions,
            pre_process=first,
            post_process=last,
            parallel_output=False,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            vp_stage=virtual,
        )
        if last and architecture.value_head is not None:
            del chunk.output_layer
            chunk.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False)
        chunks.append(chunk)
    return chunks


def named(chunks: Sequence[GPTModel]) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": value for number, chunk in enumerate(chunks) for name, value in chunk.named_parameters()
    }
