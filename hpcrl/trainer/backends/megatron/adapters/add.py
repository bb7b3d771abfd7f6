"""Adapters of Megatron-core's layers: their choice, and their first values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.sections.model import LoraConfig
from hpcrl.errors import DataError
from hpcrl.trainer.backends.megatron.adapters.experts import ExpertPlaces
from hpcrl.trainer.backends.megatron.adapters.layer import (
    ExpertAdapters,
    LayerAdapter,
    Matrices,
    adapted_weights,
    attach,
)
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.names import Slot, local_weights, slots
from hpcrl.trainer.backends.megatron.process_groups import tensor_group
from hpcrl.trainer.backends.megatron.weights import export, export_pieces
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.adapter import Adapted
from hpcrl.trainer.models.lora import adapted_layers, first_values, part_of

_LINEAR = re.compile(r"\.linear_(qkv|proj|fc1|fc2)\.weight$")


def add_adapters(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    model: PreTrainedModel,
    lora: LoraConfig,
    section: str,
    seed: int,
    *,
    shared: bool,
) -> dict[str, Adapted]:
    """Give the layers of this rank the adapters that transformers' model has; return these by name.

    Those that begin as a part of the weights begin as nothing (`take_from_weights`).

    Args:
        model: with PEFT's adapters, on the meta device.
        section: of `lora`, for errors.
        seed: of their first values, which are those of FSDP2 whatever the layout.
        shared: the layers of transformers in one of Megatron-core have one A (lora_type "lora").

    Raises:
        DataError: Megatron-core has no such layer; only a part of a layer would be adapted, where they have one A; or adapter_path has no
            such adapters.
    """
    config = chunks[0].config
    _require_options(config)
    table = {name: slot for name, slot in slots(architecture).items() if _LINEAR.search(name)}
    layers, places = list(adapted_layers(model)), ExpertPlaces(table)
    adapted = {name: one for each in layers for name, one in places.of_each(each)}
    _require_layers(table, adapted, section)
    if shared:
        for slot in table.values():
            _require_alike(slot, adapted, section)
    here = {part.name: part for part in local_weights(chunks, architecture) if part.name in table}
    wanted = {name.removesuffix(".weight") for each in here for name in table[each].tensors}
    begun = _zeros(layers) if lora.begins_from_weights else first_values(model, lora, seed, section)
    first = {
        name: (one.A.clone(), one.B.clone())  # not what would keep those of all experts
        for each, (A, B) in zip(layers, begun, strict=True)
        for name, one in places.of_each(replace(each, A=A, B=B))
        if name in wanted
    }
    if shared and lora.adapter_path is not None:
        for slot in table.values():
            _require_one_A(slot, first, section)
    made = {
        part.parameter: LayerAdapter(table[name], adapted, first, config, lora.dropout, shared=shared)
        for name, part in here.items()
        if any(each.removesuffix(".weight") in adapted for each in table[name].tensors)
    }
    assert all(here[name].expert is None for name in here if here[name].parameter in made), "experts that are no layers"
    _attach(chunks, made)
    return adapted


def _require_options(config: TransformerConfig) -> None:
    for name, wrong in (
        ("sequence_parallel=false", tensor_group().size() > 1 and not config.sequence_parallel),
        ("moe_shared_expert_overlap=true", getattr(config, "moe_shared_expert_overlap", False)),
    ):
        if wrong:
            raise DataError(
                f"trainer.policy.megatron_config.transformer_config_kwargs.{name} does not work with LoRA; leave it out"
            )


def _attach(chunks: Sequence[GPTModel], made: Mapping[nn.Parameter, LayerAdapter]) -> None:
    for module in [module for chunk in chunks for module in chunk.modules()]:
        own = {name: made[weight] for name, weight in module.named_parameters(recurse=False) if weight in made}
        if "weight" in own:
            attach(own["weight"], module)
        elif own:
            attach(ExpertAdapters([own[f"weight{number}"] for number in range(len(own))]), module)


def _zeros(layers: Sequence[Adapted]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for each in layers:
        yield torch.zeros(each.A.shape), torch.zeros(each.B.shape)


def _require_layers(table: Mapping[str, Slot], adapted: Mapping[str, Adapted], section: str) -> None:
    known = {name.removesuffix(".weight") for slot in table.values() for name in slot.tensors}
    for name, layer in adapted.items():
        if name not in known:
            raise DataError(
                f"{section}.target_modules: trainer.strategy=megatron cannot adapt {layer.name}; name it in {section}.exclude_modules, or "
                "use trainer.strategy=fsdp2"
            )


def _require_alike(slot: Slot, adapted: Mapping[str, Adapted], section: str) -> None:
    names = [name.removesuffix(".weight") for name in slot.tensors]
    found = {
        name: (tuple(each.A.shape), each.scaling, each.A.requires_grad)
        for name in names
        if (each := adapted.get(name)) is not None
    }
    if found and (len(found) < len(names) or len(set(found.values())) > 1):
        leaves = [name.rpartition(".")[2] for name in names]
        raise DataError(
            f"{section}: with trainer.policy.megatron_config.lora_type=lora, {', '.join(leaves)} of {names[0].rpartition('.')[0]} have one "
            f"adapter together, while only {', '.join(sorted(found))} would have one, or ranks or alphas differ. Adapt all alike or "
            "none, or set lora_type=canonical_lora"
        )


def _require_one_A(slot: Slot, first: Matrices, section: str) -> None:
    names = [name.removesuffix(".weight") for name in slot.tensors]
    found = {name: first[name][0] for name in names if name in first}
    if any(not torch.equal(A, found[names[0]]) for A in found.values()):
        raise DataError(
            f"{section}.adapter_path: {', '.join(found)} have different first matrices there; with trainer.policy.megatron_config.lora_type="
            "lora they have one together. Set lora_type=canonical_lora"
        )


def take_from_weights(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    adapted: Mapping[str, Adapted],
    lora: LoraConfig,
    seed: int,
    world: World,
    *,
    shared: bool,
) -> None:
    """Let adapters begin as the part of the weights that init_method finds, and leave the rest below them. All ranks call it.

    One of the ranks that hold a weight finds the part of it, in the whole weight, and tells the others.

    Args:
        adapted: as `add_adapters` returned it.
        shared: layers with one A are taken as one matrix.
    """
    names = {f"{name}.weight" for name in adapted}
    first_of = {
        name.removesuffix(".weight"): next(iter(slot.tensors))
        for slot in slots(architecture).values()
        for name in slot.tensors
        if shared or slot.expert is not None
    }
    pieces = export_pieces(chunks, architecture, torch.float32, world, names)
    owners = [piece.ranks[number % len(piece.ranks)] for number, piece in enumerate(pieces)]
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensors in export(chunks, architecture, torch.Tensor.detach, torch.float32, owners, names):
        weights = {name: W for stored, W in tensors.items() if (name := stored.removesuffix(".weight")) in adapted}
        sharing: dict[str, dict[str, torch.Tensor]] = {}
        for name, W in weights.items():
            sharing.setdefault(first_of.get(name, name), {})[name] = W
        for together in sharing.values():
            found |= _parts(together, adapted, lora.init_method, seed)
    device = torch.cuda.current_device()
    for piece, owner in zip(pieces, owners, strict=True):
        for name in [name for stored in piece.tensors if (name := stored.removesuffix(".weight")) in adapted]:
            if name not in found:
                shapes = adapted[name].A.shape, adapted[name].B.shape
                found[name] = torch.empty(shapes[0], device=device), torch.empty(shapes[1], device=device)
            for matrix in found[name]:
                dist.broadcast(matrix, owner)
    for weight, adapter in adapted_weights(chunks):
        adapter.begin_as(found, weight)


def _parts(
    weights: Mapping[str, torch.Tensor], adapted: Mapping[str, Adapted], method: str, seed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    one = adapted[next(iter(weights))]
    A, B = part_of(torch.cat(list(weights.values())), one.rank, one.scaling, method, seed)
    rows = B.split([len(W) for W in weights.values()])
    return {name: (A.contiguous(), own.contiguous()) for name, own in zip(weights, rows, strict=True)}
