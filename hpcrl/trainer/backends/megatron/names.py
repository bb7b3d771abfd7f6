"""Table of Hugging Face tensors and Megatron-core's parameters.

The table (`slots`) lists whole weights under the names of megatron's local layers, with numbers of layers and experts that count
over all ranks. `local_weights` lists those of a rank, whether its layers are the local ones or TransformerEngine's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from hpcrl.trainer.backends.megatron.architecture import Architecture

EMBEDDING, HEAD, VALUE_HEAD = "embedding.word_embeddings.weight", "output_layer.weight", "value_head.weight"
ADAPTER = "adapter"
"""Name of the adapter in the linear layer that it adapts."""

# TransformerEngine's linear layers hold the norm before them
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_OF_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.(?P<one>linear_fc[12]\.weight)|(?P<many>linear_fc[12]\.weight)(?P<te>\d+))"
)
_OF_ALL_EXPERTS = {"mlp.experts.weight1": "linear_fc1.weight", "mlp.experts.weight2": "linear_fc2.weight"}


@dataclass(frozen=True)
class Block:
    """A stretch of a Hugging Face tensor along the dimension of its slot."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Slot:
    """A weight of megatron, over all ranks that share it: Hugging Face tensors that are cut into parts and taken in turn.

    Attributes:
        tensors: Hugging Face name -> shape.
        dim: along which they are cut and tensor parallelism splits.
        parts: into how many parts each is cut; None: one for each rank.
        split: tensor parallelism splits it; otherwise each rank has all of it.
        expert: number of the expert to which it belongs.
    """

    tensors: dict[str, tuple[int, ...]]
    dim: int = 0
    parts: int | None = 1
    split: bool = True
    expert: int | None = None

    def shape(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of one rank's share, with padding to equal shares."""
        whole = next(iter(self.tensors.values()))
        length = sum(shape[self.dim] for shape in self.tensors.values())
        share = -(-length // ranks) if self.split else length
        return (*whole[: self.dim], share, *whole[self.dim + 1 :])

    def share(self, rank: int, ranks: int) -> list[Block]:
        """Return the blocks of a rank's share in order; padding comes after them."""
        if not self.split:
            rank, ranks = 0, 1
        size, parts = self.shape(ranks)[self.dim], self.parts or ranks
        start, stop = rank * size, (rank + 1) * size
        blocks, at = [], 0
        for part in range(parts):
            for name, shape in self.tensors.items():
                length = shape[self.dim] // parts
                first, last = max(start, at), min(stop, at + length)
                if first < last:
                    begin = part * length - at
                    blocks.append(Block(name, begin + first, begin + last))
                at += length
        return blocks


def _replicated(name: str, *shape: int) -> Slot:
    return Slot({name: shape}, split=False)


def slots(architecture: Architecture) -> dict[str, Slot]:
    """Return the whole model, by name of the slot, from the embedding to the head."""
    fields, hidden = architecture.transformer, architecture.transformer["hidden_size"]
    words = (architecture.vocab_size, hidden)
    table = {EMBEDDING: Slot({"model.embed_tokens.weight": words})}
    for layer in range(fields["num_layers"]):
        inside = _attention(architecture, layer) | _mlp(architecture, layer)
        table |= {f"decoder.layers.{layer}.{name}": slot for name, slot in inside.items()}
    table["decoder.final_layernorm.weight"] = _replicated("model.norm.weight", hidden)
    if architecture.value_head is not None:
        table[VALUE_HEAD] = _replicated(f"{architecture.value_head}.weight", 1, hidden)
    elif not architecture.tied:
        table[HEAD] = Slot({"lm_head.weight": words})
    return table


def _attention(architecture: Architecture, layer: int) -> dict[str, Slot]:
    fields, prefix = architecture.transformer, f"model.layers.{layer}."
    hidden, channels, groups = fields["hidden_size"], fields["kv_channels"], fields["num_query_groups"]
    queries = fields["num_attention_heads"] * channels
    rows = {
        f"{prefix}self_attn.{letter}_proj": size
        for letter, size in (("q", queries), ("k", groups * channels), ("v", groups * channels))
    }
    table = {
        "input_layernorm.weight": _replicated(f"{prefix}input_layernorm.weight", hidden),
        # each group of queries lies before its key and its value
        "self_attention.linear_qkv.weight": Slot(
            {f"{name}.weight": (size, hidden) for name, size in rows.items()}, parts=groups
        ),
    }
    if fields["add_qkv_bias"]:
        biases = {f"{name}.bias": (size,) for name, size in rows.items()}
        table["self_attention.linear_qkv.bias"] = Slot(biases, parts=groups)
    if fields["qk_layernorm"]:
        for letter in "qk":
            norm = _replicated(f"{prefix}self_attn.{letter}_norm.weight", channels)
            table[f"self_attention.{letter}_layernorm.weight"] = norm
    table["self_attention.linear_proj.weight"] = Slot({f"{prefix}self_attn.o_proj.weight": (hidden, queries)}, dim=1)
    table["pre_mlp_layernorm.weight"] = _replicated(f"{prefix}post_attention_layernorm.weight", hidden)
    return table


def _mlp(architecture: Architecture, layer: int) -> dict[str, Slot]:
    fields, hidden = architecture.transformer, architecture.transformer["hidden_size"]
    prefix, names = f"model.layers.{layer}.mlp.", ("gate_proj", "up_proj", "down_proj")
    if not _has_experts(architecture, layer):
        return _gated("mlp", prefix, names, hidden, fields["ffn_hidden_size"])
    if architecture.family == "mixtral":
        prefix, names = f"model.layers.{layer}.block_sparse_moe.", ("w1", "w3", "w2")
    experts = fields["num_moe_experts"]
    table = {"mlp.router.weight": _replicated(f"{prefix}gate.weight", experts, hidden)}
    for expert in range(experts):
        inside = f"{prefix}experts.{expert}."
        table |= _gated(f"mlp.experts.{expert}", inside, names, hidden, fields["moe_ffn_hidden_size"], expert)
    shared = fields.get("moe_shared_expert_intermediate_size")
    if shared is not None:
        table |= _gated("mlp.shared_experts", f"{prefix}shared_expert.", names, hidden, shared)
        table["mlp.shared_experts.gate_weight"] = _replicated(f"{prefix}shared_expert_gate.weight", 1, hidden)
    return table


def _has_experts(architecture: Architecture, layer: int) -> bool:
    if "num_moe_experts" not in architecture.transformer:
        return False
    layers = architecture.transformer["moe_layer_freq"]
    return layers == 1 or bool(layers[layer])


def _gated(
    megatron: str, prefix: str, names: tuple[str, str, str], hidden: int, width: int, expert: int | None = None
) -> dict[str, Slot]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    # each rank has its part of the gate before its part of what is gated
    both = {gate: (width, hidden), up: (width, hidden)}
    return {
        f"{megatron}.linear_fc1.weight": Slot(both, parts=None, expert=expert),
        f"{megatron}.linear_fc2.weight": Slot({down: (hidden, width)}, dim=1, expert=expert),
    }


def name_over_all(chunk: GPTModel, name: str) -> str:
    """Return the name that something in a chunk has with numbers of layers that count over all ranks."""
    inside = _OF_LAYER.fullmatch(name)
    if inside is None:
        return name
    layer = cast("TransformerLayer", chunk.decoder.layers[int(inside[1])])
    return f"decoder.layers.{layer.layer_number - 1}.{inside[2]}"


def slot_names(name: str, layer: int, experts: range) -> list[str]:
    """Return the slots that lie in a parameter of GPTModel: one, or one for each expert of the rank.

    Args:
        name: of the parameter, in the local layers' scheme or in TransformerEngine's.
        layer: number of its layer, from 0, over all ranks; of no meaning outside of layers.
        experts: numbers of the rank's experts, over all ranks.
    """
    inside = _OF_LAYER.fullmatch(name)
    if inside is None:
        return [name]
    prefix, rest = f"decoder.layers.{layer}.", inside[2]
    if rest in _OF_ALL_EXPERTS:
        return [f"{prefix}mlp.experts.{expert}.{_OF_ALL_EXPERTS[rest]}" for expert in experts]
    expert = _OF_EXPERT.fullmatch(rest)
    if expert is None:
        return [prefix + _FUSED_NORMS.get(rest, rest)]
    number = experts[int(expert["local"] or expert["te"])]
    return [f"{prefix}mlp.experts.{number}.{expert['one'] or expert['many']}"]


@dataclass(frozen=True)
class LocalWeight:
    """A rank's share of a slot.

    Attributes:
        name: of the slot.
        expert: place of the expert in a parameter that holds all of a rank's, as [experts, input, output]; None: it is the parameter.
        copy: another stage's share is the original (tied embeddings).
    """

    name: str
    parameter: nn.Parameter
    experts: int = 1
    expert: int | None = None
    copy: bool = False

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the share as a view of a tensor that is shaped like the parameter."""
        if self.expert is None:
            return tensor
        # GroupedMLP declares [input, experts * output] and [experts * input, output], and reads both as [experts, input, output]
        middle = (tensor.shape[0], -1) if self.name.endswith("linear_fc1.weight") else (-1, tensor.shape[1])
        return tensor.view(self.experts, *middle)[self.expert].t()


def local_weights(chunks: Sequence[GPTModel], architecture: Architecture) -> Iterator[LocalWeight]:
    """Yield the weights of this rank, without adapters.

    Args:
        chunks: the rank's pipeline stages, bare: without wrappers.
    """
    experts = local_experts(architecture)
    for chunk in chunks:
        layers = [cast("TransformerLayer", layer).layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            if f".{ADAPTER}." in name:
                continue
            inside = _OF_LAYER.fullmatch(name)
            found = slot_names(name, layers[int(inside[1])] if inside else 0, experts)
            if name == HEAD and architecture.tied:
                yield LocalWeight(EMBEDDING, parameter, copy=True)
            elif inside is not None and inside[2] in _OF_ALL_EXPERTS:
                for place, slot in enumerate(found):
                    yield LocalWeight(slot, parameter, len(found), place)
            else:
                yield LocalWeight(found[0], parameter)


def local_experts(architecture: Architecture) -> range:
    """Return the numbers of the experts on this rank."""
    each = architecture.transformer.get("num_moe_experts", 0) // parallel_state.get_expert_model_parallel_world_size()
    first = each * parallel_state.get_expert_model_parallel_rank()
    return range(first, first + each)


def hf_names(chunks: Sequence[GPTModel], architecture: Architecture) -> dict[nn.Parameter, list[str]]:
    """Return the names of the Hugging Face tensors that lie in each of this rank's parameters."""
    table, names = slots(architecture), {}
    for part in local_weights(chunks, architecture):
        names.setdefault(part.parameter, []).extend(table[part.name].tensors)
    return names


def name_in_memory(name: str) -> str:
    """Return transformers' parameter of a tensor of a file: the experts of a layer are one parameter."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    name = re.sub(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$", ".experts.gate_up_proj", name)
    return re.sub(r"\.experts\.\d+\.(down_proj|w2)\.weight$", ".experts.down_proj", name)


def table_name(name: str) -> str:
    """Return the table's name of a parameter of transformers' model, whose body has no prefix in a critic."""
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name
