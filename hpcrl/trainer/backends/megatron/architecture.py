"""Megatron-core's TransformerConfig from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hpcrl.config.rules.model_fit import MEGATRON_FAMILIES
from hpcrl.errors import DataError
from hpcrl.trainer.models.logits import logit_changes

_REMEDY = "train it with trainer.strategy=fsdp2"


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """A model as Megatron-core's GPTModel is built.

    Attributes:
        family: model_type of the Hugging Face configuration, one of MEGATRON_FAMILIES.
        transformer: the fields of megatron's TransformerConfig that follow from the model.
        vocab_size: tokens of the model, without what tensor parallelism pads.
        padding: token whose embedding transformers does not train, except as a part of a tied head.
        tied: embedding and output head are one matrix.
        max_positions: longest sequence.
        inv_freq: [kv_channels / 2] float32, angle per position of each pair of rotated channels.
        value_head: name of a head that gives one number in place of the vocabulary's; None: a language model.
        classifier: that is the head of transformers' classifier, not of a critic.
    """

    family: str
    transformer: dict[str, Any]
    vocab_size: int
    padding: int | None
    tied: bool
    max_positions: int
    inv_freq: torch.Tensor
    value_head: str | None = None
    classifier: bool = False

    def own_name(self, name: str) -> str:
        """Return transformers' name of a parameter of the table of names: a critic's body has no prefix."""
        return name if self.value_head is None or self.classifier else name.removeprefix("model.")


def architecture_of(
    config: PreTrainedConfig, path: str, value_head: str | None = None, *, classifier: bool = False
) -> Architecture:
    """Return the architecture of `config` for Megatron-core.

    Args:
        path: of the model, for errors.
        value_head: name of the head of a critic or of a classifier; None: the model is a language model.

    Raises:
        DataError: the family is none of MEGATRON_FAMILIES, or megatron's layers would compute something else than transformers' do.
    """
    if config.model_type not in MEGATRON_FAMILIES:
        raise DataError(
            f'the model at {path} is of type "{config.model_type}", which trainer.strategy=megatron does not know; it knows '
            f"{', '.join(MEGATRON_FAMILIES)}. {_REMEDY.capitalize()}"
        )
    others = list(_differences(config))
    if others:
        raise DataError(
            f"the model at {path} has {', '.join(others)}, which trainer.strategy=megatron does not compute; {_REMEDY}"
        )
    return Architecture(
        family=config.model_type,
        transformer=_dense(config) | _experts(config),
        vocab_size=config.vocab_size,
        padding=config.pad_token_id,
        tied=bool(config.tie_word_embeddings) and value_head is None,
        max_positions=config.max_position_embeddings,
        inv_freq=_rotary(config, path),
        value_head=value_head,
        classifier=classifier,
    )


def _differences(config: PreTrainedConfig) -> Iterator[str]:
    """Yield settings that Megatron's layers would silently ignore."""
    yield from logit_changes(config)
    window = _sliding_window(config)
    if window:
        yield f"a sliding window of {window} tokens"
    if config.hidden_act != "silu":
        yield f"the activation {config.hidden_act}"
    for name in ("attention_bias", "mlp_bias"):  # attention_bias is one of the output projection too
        if getattr(config, name, False):
            yield name
    if getattr(config, "quantization_config", None) is not None:
        yield "quantized weights"
    if _expert_layers(config) and config.num_experts_per_tok == 1 and _normalized(config):
        yield "one expert per token with normalized weights (no gradient reaches its router)"


def _sliding_window(config: PreTrainedConfig) -> int | None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or window >= config.max_position_embeddings:
        return None
    return window if kinds is None or "sliding_attention" in kinds else None


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _dense(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads or config.num_attention_heads,
        "kv_channels": _head_dim(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.model_type == "qwen2" or bool(getattr(config, "qkv_bias", False)),
        "qk_layernorm": config.model_type in ("qwen3", "qwen3_moe"),
        # old and new log-probabilities of a policy must come from the same function
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a mixture of experts; empty: all layers are dense.

    The router's type stays megatron's default: logits in the type that computes and their softmax in float32, as in transformers.
    """
    layers = _expert_layers(config)
    if not any(layers):
        return {}
    mixtral = config.model_type == "mixtral"
    fields: dict[str, Any] = {
        "num_moe_experts": config.num_local_experts if mixtral else config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size if mixtral else config.moe_intermediate_size,
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_score_function": "softmax",
        # a softmax over the chosen logits is the softmax over all of them, normalized over the chosen
        "moe_router_pre_softmax": not _normalized(config),
    }
    if config.model_type == "qwen2_moe":
        fields["moe_shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
        fields["moe_shared_expert_gate"] = True
    return fields


def _expert_layers(config: PreTrainedConfig) -> list[int]:
    """Return 1 for each layer with experts and 0 for each dense one; empty for families without experts."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        return [1 for _ in layers]
    if not getattr(config, "num_experts", 0):
        return []
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    return [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]


def _normalized(config: PreTrainedConfig) -> bool:
    return config.model_type == "mixtral" or config.norm_topk_prob


def _rotary(config: PreTrainedConfig, path: str) -> torch.Tensor:
    # of all these families the same; it takes the frequencies from ROPE_INIT_FUNCTIONS
    rotary: Any = LlamaRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]
    kind = rotary.rope_type
    if kind == "longrope" or "dynamic" in kind:
        problem = "whose angles depend on the length of the sequence"
    elif rotary.attention_scaling != 1.0:
        problem = f"which scales attention by {rotary.attention_scaling:g}"
    elif rotary.inv_freq.shape != (_head_dim(config) // 2,):
        problem = "which rotates only a part of each head"
    else:
        return rotary.inv_freq.detach().clone()
    raise DataError(
        f'the model at {path} has rotary positions of type "{kind}", {problem}; trainer.strategy=megatron does not compute '
        f"that. {_REMEDY.capitalize()}, or give others with trainer.rope_scaling"
    )
