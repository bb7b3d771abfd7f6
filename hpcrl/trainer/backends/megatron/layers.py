"""Layer specs of the models: TransformerEngine's where it is installed, or else Megatron-core's own with torch's attention."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from hpcrl.trainer.backends.megatron.packed import Packing
from hpcrl.trainer.backends.megatron.process_groups import context_group
from hpcrl.trainer.models.packed.attention import attend
from hpcrl.trainer.models.packed.kernels import AttentionKind


def uses_transformer_engine() -> bool:
    """Return whether layers are TransformerEngine's: it is installed, and there is a GPU."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def describe_layers() -> str:
    """Return the kind of layers used here, in words."""
    if uses_transformer_engine():
        return "TransformerEngine's"
    missing = "there is no GPU" if not torch.cuda.is_available() else "transformer_engine is not installed"
    return f"Megatron-core's, with torch's attention ({missing})"


def layer_specs(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the layer specs of this rank's pipeline stage.

    Args:
        chunk: which of the stage's parts, with an interleaved schedule; None: it has one.
    """
    engine = uses_transformer_engine()
    specs: Any = get_gpt_decoder_layer_specs(config, engine, normalization="RMSNorm", vp_stage=chunk)
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    own = specs[first : first + get_num_layers_to_build(config, vp_stage=chunk)]
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return _block(own, TENorm)
    return _block([_local(spec) for spec in own], Norm)


def _block(layers: list[ModuleSpec], norm: Any) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _local(spec: ModuleSpec) -> ModuleSpec:
    layer: Any = spec.submodules
    heads: Any = layer.self_attention.submodules
    of_heads = {} if heads.q_layernorm is IdentityOp else {"q_layernorm": Norm, "k_layernorm": Norm}
    heads = dataclasses.replace(heads, core_attention=PackedAttention, **of_heads)
    attention = dataclasses.replace(layer.self_attention, submodules=heads)
    layer = dataclasses.replace(layer, input_layernorm=Norm, pre_mlp_layernorm=Norm, self_attention=attention)
    return dataclasses.replace(spec, submodules=layer)


class Norm(torch.nn.RMSNorm):
    """The norm that Megatron-core's own refuses to be under sequence parallelism: its gradient is a sum over those ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Attention over packed samples by torch, also with context parallelism: each rank gathers the keys and values of all.

    Takes what Megatron-core makes a core attention with; dropout is never applied.
    """

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> torch.Tensor:
        """Return [P_own, H * D] for query [P_own, H, D], key and value [P_own, Hkv, D]."""
        packing, scale = packed_seq_params, self._scale
        assert packing.sequences is not None
        if context_group().size() == 1:
            output = attend(query, key, value, packing.sequences, AttentionKind(scale))
        else:
            output = _over_ranks(query, key, value, packing, scale)
        return output.flatten(1)


def _over_ranks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None
) -> torch.Tensor:
    sequences, own, order = packing.sequences, packing.own, packing.order
    assert sequences is not None
    assert own is not None
    assert order is not None
    group = context_group()
    # what each rank's queries ask of a key is added up on the rank that has it
    key, value = (gather_from_sequence_parallel_region(part, True, group)[order] for part in (key, value))
    queries = query.new_zeros(len(order), *query.shape[1:]).index_copy(0, own, query)
    return attend(queries, key, value, sequences, AttentionKind(scale))[own]
