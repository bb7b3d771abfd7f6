"""Hugging Face configurations as Megatron-core's fields; test_weights.py compares what comes out of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hpcrl.errors import DataError
from hpcrl.trainer.backends.megatron.architecture import architecture_of

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DENSE = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-4,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
MIXTURE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}

Kind = type[PreTrainedConfig]


def transformer(kind: Kind, **entries: Any) -> dict[str, Any]:
    return architecture_of(kind(**SIZES | entries), "models/tiny").transformer


@pytest.mark.parametrize(
    ("kind", "entries", "changes"),
    [
        (Qwen2Config, {"attention_dropout": 0.1}, {"add_qkv_bias": True}),
        (Qwen3Config, {"head_dim": 16}, {"qk_layernorm": True, "kv_channels": 16}),
        (LlamaConfig, {}, {}),
        (LlamaConfig, {"num_key_value_heads": None}, {"num_query_groups": 4}),
        (MistralConfig, {"sliding_window": None, "head_dim": 16}, {"kv_channels": 16}),
        (
            MixtralConfig,
            {"num_local_experts": 4},
            MIXTURE | {"moe_ffn_hidden_size": 48, "moe_router_pre_softmax": False},
        ),
        (Qwen3MoeConfig, EXPERTS | {"head_dim": 16}, MIXTURE | {"qk_layernorm": True, "kv_channels": 16}),
        (
            Qwen3MoeConfig,
            EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [3]},
            MIXTURE | {"qk_layernorm": True, "moe_router_pre_softmax": False, "moe_layer_freq": [1, 1, 1, 0]},
        ),
        (Qwen3MoeConfig, EXPERTS | {"mlp_only_layers": [0, 1, 2, 3]}, {"qk_layernorm": True}),
        (
            Qwen2MoeConfig,
            EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
            MIXTURE | SHARED | {"add_qkv_bias": True, "moe_layer_freq": [0, 1, 0, 1]},
        ),
        (
            Qwen2MoeConfig,
            EXPERTS | {"shared_expert_intermediate_size": 40, "qkv_bias": False, "num_experts_per_tok": 1},
            MIXTURE | SHARED | {"moe_router_topk": 1},
        ),
    ],
)
def test_a_model_says_what_megatron_computes(kind: Kind, entries: dict[str, Any], changes: dict[str, Any]):
    assert transformer(kind, **entries) == DENSE | changes


def test_sizes_outside_of_layers():
    tied = architecture_of(LlamaConfig(**SIZES, tie_word_embeddings=True), "models/tiny")
    assert (tied.family, tied.vocab_size, tied.max_positions, tied.tied) == ("llama", 131, 64, True)
    assert not architecture_of(LlamaConfig(**SIZES), "models/tiny").tied
    critic = architecture_of(LlamaConfig(**SIZES, tie_word_embeddings=True), "models/tiny", value_head="score")
    assert (critic.tied, critic.value_head) == (False, "score")


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_are_those_of_transformers(kind: str):
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **ROPES[kind]})
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, None)
    assert torch.equal(architecture_of(config, "models/tiny").inv_freq, expected)


def test_plain_rotary_frequencies():
    config = Qwen3Config(**SIZES, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    found = architecture_of(config, "models/tiny").inv_freq
    assert torch.allclose(found, 5000.0 ** -(torch.arange(8) / 8), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "entries", "problem"),
    [
        (MistralConfig, {"sliding_window": 32}, "a sliding window of 32 tokens"),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "window of 8 tokens"),
        (LlamaConfig, {"attention_bias": True}, "attention_bias"),
        (Qwen3Config, {"attention_bias": True}, "attention_bias"),
        (LlamaConfig, {"mlp_bias": True}, "mlp_bias"),
        (LlamaConfig, {"hidden_act": "gelu"}, "the activation gelu"),
        (LlamaConfig, {"final_logit_softcapping": 30.0, "logit_scale": 2.0}, "logit_scale, final_logit_softcapping"),
        (LlamaConfig, {"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        (MixtralConfig, {"num_experts_per_tok": 1}, "one expert per token"),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            '"yarn", which scales attention by 1.13863',
        ),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            '"dynamic", whose angles depend on the length of the sequence',
        ),
        (
            LlamaConfig,
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            '"longrope", whose angles depend on the length of the sequence',
        ),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(kind: Kind, entries: dict[str, Any], problem: str):
    with pytest.raises(DataError) as raised:
        architecture_of(kind(**SIZES | entries), "models/tiny")
    assert problem in str(raised.value)
    assert "models/tiny" in str(raised.value)
    assert "trainer.strategy=fsdp2" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        (MistralConfig, {"sliding_window": 64}),
        (Qwen2Config, {"use_sliding_window": False, "sliding_window": 8}),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}),
    ],
)
def test_a_window_that_hides_nothing_is_none(kind: Kind, entries: dict[str, Any]):
    assert transformer(kind, **entries)["num_layers"] == 4


def test_an_unknown_family_is_refused():
    with pytest.raises(
        DataError, match=r'"gpt2".*it knows llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe'
    ):
        architecture_of(GPT2Config(), "models/tiny")
