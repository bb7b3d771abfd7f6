"""LoRA on Megatron-core's linear layers, each of which may hold several of transformers' layers: query, key and value, or gate and up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.nn.functional import linear, rms_norm
from transformers import PreTrainedModel

from hpcrl.config.sections.model import LoraConfig
from hpcrl.errors import DataError
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.names import ADAPTER, Slot, local_weights, slots, table_name
from hpcrl.trainer.backends.megatron.process_groups import tensor_group
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.lora import Adapted, adapted_layers, first_values

_LINEAR = re.compile(r"\.linear_(qkv|proj|fc1|fc2)\.weight$")


class LayerAdapter(nn.Module):
    """What is added to the output of a linear layer: for the rows of each of transformers' layers in it, s B A x.

    Where ranks share the layer's rows, each has those rows of B, and all of A; it computes A x of its own tokens. Where more ranks than groups
    of queries share them, each has all of B. Where ranks share columns, each has those of A, and all of B.

    Args:
        slot: the layer's weight.
        adapted: transformers' layers that have adapters, by name; some of those in the slot.
        first: A and B of each, whole, as training begins.
        shared: they have one A, that of the first.
        dropout: probability that a number of the input is left out.
    """

    def __init__(
        self,
        slot: Slot,
        adapted: Mapping[str, Adapted],
        first: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        config: TransformerConfig,
        dropout: float,
        *,
        shared: bool,
    ) -> None:
        super().__init__()
        self.by_rows, self.enabled = slot.dim == 0, True
        rank, ranks = tensor_group().rank(), tensor_group().size()
        self._even = slot.parts is None or slot.parts % ranks == 0
        sizes = {name.removesuffix(".weight"): shape[0] for name, shape in slot.tensors.items()}
        self._rows = {name: range(size) for name, size in sizes.items()}
        self._order: torch.Tensor | None = None
        if self.by_rows:
            blocks = [(each.name.removesuffix(".weight"), each.start, each.stop) for each in slot.share(rank, ranks)]
            self._rows, order = _rows(list(sizes), blocks)
            if order != sorted(order):
                self._order = torch.tensor(order, device=torch.cuda.current_device())
        self.layers = [name for name in sizes if name in adapted]
        self.source = {name: self.layers[0] if shared else name for name in self.layers}
        self.scaling = {name: adapted[name].scaling for name in self.layers}
        self._dropout = nn.Dropout(dropout)
        for name in self.layers:
            A, B = first[name]
            if self.source[name] == name:
                share = A if self.by_rows else A.chunk(ranks, 1)[rank]
                self._add("A", name, share, adapted[name].A.requires_grad, config)
            if self._even:
                B = B[self._rows[name].start : self._rows[name].stop]
            self._add("B", name, B, adapted[name].B.requires_grad, config)

    def _add(self, letter: str, name: str, value: torch.Tensor, trained: bool, config: TransformerConfig) -> None:
        value = value.to(torch.cuda.current_device(), config.params_dtype, copy=True).contiguous()
        parameter: Any = nn.Parameter(value, requires_grad=trained)
        axis = self.axis(letter)
        if axis is not None:
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        else:  # a rank's gradient is that of its tokens
            parameter.sequence_parallel = config.sequence_parallel
        self.register_parameter(_attribute(letter, name), parameter)

    def axis(self, letter: str) -> int | None:
        """Return along which dimension ranks share a matrix; None: each has all of it."""
        if self.by_rows:
            return 0 if letter == "B" and self._even else None
        return 1 if letter == "A" else None

    def matrices(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield A or B, the layer of transformers, and this rank's share of the matrix."""
        for letter, names in (("A", [name for name in self.layers if self.source[name] == name]), ("B", self.layers)):
            for name in names:
                yield letter, name, self.get_parameter(_attribute(letter, name))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [P, 1, rows] for the input of the layer, [P, 1, columns], with the shares of tokens, rows and columns that the layer has."""
        found = [(name, matrix) for letter, name, matrix in self.matrices() if letter == "A"]
        low = linear(self._dropout(hidden), torch.cat([A for _, A in found]))
        # under tensor parallelism, tokens are always shared too (sequence parallelism)
        exchange: Any = (
            gather_from_sequence_parallel_region if self.by_rows else reduce_scatter_to_sequence_parallel_region
        )
        parts = exchange(low, group=tensor_group()).split([len(A) for _, A in found], -1)
        lows = dict(zip((name for name, _ in found), parts, strict=True))
        return self._in_order(lambda name, B: linear(lows[self.source[name]], B), lows[self.layers[0]])

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of W + s B A, float32, for that of W."""
        of = {name: matrix.detach().float() for letter, name, matrix in self.matrices() if letter == "A"}
        added = self._in_order(lambda name, B: of[self.source[name]].t() @ B.detach().float().t(), weight.float().t())
        return weight.float() + added.t()

    def _in_order(self, part: Callable[[str, torch.Tensor], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return [..., rows] of parts [..., rows of one layer], in the order of the layer's weight."""
        B, parts = {name: matrix for letter, name, matrix in self.matrices() if letter == "B"}, []
        for name, rows in self._rows.items():
            if name in B:
                own = B[name] if self._even else B[name][rows.start : rows.stop]
                parts.append(self.scaling[name] * part(name, own))
            else:
                parts.append(like.new_zeros(*like.shape[:-1], len(rows)))
        together = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return together if self._order is None else together.index_select(-1, self._order)


def _rows(names: list[str], blocks: list[tuple[str, int, int]]) -> tuple[dict[str, range], list[int]]:
    """Return the rows of each layer that a rank has, and for each row of its weight the place among those rows, one layer after the other.

    Args:
        blocks: of the rank's weight, in order: layer, first row and the one behind the last.
    """
    rows, ends, at = {}, dict[str, int](), 0
    for name in names:
        of_name = [(start, stop) for found, start, stop in blocks if found == name]
        rows[name] = range(
            min((start for start, _ in of_name), default=0), max((stop for _, stop in of_name), default=0)
        )
        assert len(rows[name]) == sum(stop - start for start, stop in of_name)
        ends[name] = at
        at += len(rows[name])
    order = [ends[name] + row - rows[name].start for name, start, stop in blocks for row in range(start, stop)]
    return rows, order


def _attribute(letter: str, name: str) -> str:
    return f"lora_{letter}_{name.rpartition('.')[2]}"


def _add_output(layer: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    adapter: LayerAdapter = layer.get_submodule(ADAPTER)
    if not adapter.enabled:
        return output
    hidden, norm = inputs[0], getattr(layer, "layer_norm_weight", None)
    if norm is not None:  # TransformerEngine's layers hold the norm before them
        hidden = rms_norm(hidden, norm.shape, norm, layer.eps)
    result, bias = output
    return result + adapter(hidden), bias


def add_adapters(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    model: PreTrainedModel,
    lora: LoraConfig,
    section: str,
    seed: int,
    *,
    shared: bool,
) -> None:
    """Give the layers of this rank the adapters that transformers' model has.

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
    if tensor_group().size() > 1 and not config.sequence_parallel:
        raise DataError(
            "trainer.policy.megatron_config.transformer_config_kwargs.sequence_parallel=false does not work with LoRA; leave it out"
        )
    if getattr(config, "moe_shared_expert_overlap", False):
        raise DataError(
            "trainer.policy.megatron_config.transformer_config_kwargs.moe_shared_expert_overlap=true does not work with LoRA; leave it out"
        )
    table = {name: slot for name, slot in slots(architecture).items() if _LINEAR.search(name) and slot.expert is None}
    adapted = {table_name(each.name): each for each in adapted_layers(model)}
    _require_layers(table, adapted, section)
    if shared:
        for slot in table.values():
            _require_alike(slot, adapted, section)
    layer_of = {
        parameter: module
        for chunk in chunks
        for module in chunk.modules()
        for parameter in module.parameters(recurse=False)
    }
    here = {part.name: layer_of[part.parameter] for part in local_weights(chunks, architecture) if part.name in table}
    wanted = {name.removesuffix(".weight") for each in here for name in table[each].tensors}
    values = zip(adapted, first_values(model, lora, seed, section), strict=True)
    first = {name: matrices for name, matrices in values if name in wanted}
    if shared and lora.adapter_path is not None:
        for slot in table.values():
            _require_one_A(slot, first, section)
    for name, layer in here.items():
        if any(each.removesuffix(".weight") in adapted for each in table[name].tensors):
            layer.add_module(ADAPTER, LayerAdapter(table[name], adapted, first, config, lora.dropout, shared=shared))
            layer.register_forward_hook(_add_output)


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
        for name, each in adapted.items()
        if name in names
    }
    if found and (len(found) < len(names) or len(set(found.values())) > 1):
        leaves = [name.rpartition(".")[2] for name in names]
        raise DataError(
            f"{section}: with trainer.policy.megatron_config.lora_type=lora, {', '.join(leaves)} of {names[0].rpartition('.')[0]} have one "
            f"adapter together, but only {', '.join(sorted(found))} would have one, or ranks or alphas differ; adapt all of them alike or "
            "none, or set lora_type=canonical_lora"
        )


def _require_one_A(slot: Slot, first: Mapping[str, tuple[torch.Tensor, torch.Tensor]], section: str) -> None:
    names = [name.removesuffix(".weight") for name in slot.tensors]
    found = {name: first[name][0] for name in names if name in first}
    if any(not torch.equal(A, found[names[0]]) for A in found.values()):
        raise DataError(
            f"{section}.adapter_path: {', '.join(found)} have different first matrices there; with trainer.policy.megatron_config.lora_type="
            "lora they have one together. Set lora_type=canonical_lora"
        )


def adapted_modules(chunks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, LayerAdapter]]:
    """Yield the linear layers of this rank that have adapters, with them."""
    for chunk in chunks:
        for module in chunk.modules():
            adapter = module._modules.get(ADAPTER)
            if isinstance(adapter, LayerAdapter):
                yield module, adapter


def merging(chunks: Sequence[nn.Module]) -> Callable[[nn.Parameter], torch.Tensor]:
    """Return what gives a parameter's values: where it has an adapter, merged with it, in float32."""
    adapters = {layer.get_parameter("weight"): adapter for layer, adapter in adapted_modules(chunks)}

    def values(parameter: nn.Parameter) -> torch.Tensor:
        return adapters[parameter].merged(parameter.detach()) if parameter in adapters else parameter.detach()

    return values


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Let a model compute as if it had no adapters."""
    adapters = [adapter for _, adapter in adapted_modules(chunks)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def _matrix_name(letter: str, name: str) -> str:
    return f"{name}.lora_{letter}.weight"


def whole_adapters(
    chunks: Sequence[GPTModel], value: Callable[[nn.Parameter], torch.Tensor], world: World
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, float]]:
    """Return A and B of each adapter by the name of transformers' layer, whole, on the CPU of every rank, and s of each. All ranks call it.

    Args:
        value: what is gathered of a rank's share of a matrix, of its shape and type: its data, or its gradient.
    """
    adapters = [adapter for _, adapter in adapted_modules(chunks)]
    layers = {name: [adapter.source[name], adapter.scaling[name]] for adapter in adapters for name in adapter.layers}
    here = {
        _matrix_name(letter, name): (value(matrix), adapter.axis(letter))
        for adapter in adapters
        for letter, name, matrix in adapter.matrices()
    }
    shapes = {name: _whole_shape(*share) for name, share in here.items()}
    everyones, whole = world.all_gather(lambda: [layers, shapes]), dict[str, torch.Tensor]()
    for rank, (_, shapes_there) in enumerate(everyones):
        for name in [name for name in shapes_there if name not in whole]:
            if name in here:
                found = _gathered(*here[name])
            else:
                dtype, device = chunks[0].config.params_dtype, torch.cuda.current_device()
                found = torch.empty(shapes_there[name], dtype=dtype, device=device)
            if any(name not in others for _, others in everyones):  # only some pipeline stages have it
                dist.broadcast(found, rank)
            whole[name] = found.cpu()
    everywhere: dict[str, tuple[str, float]] = {name: layer for told, _ in everyones for name, layer in told.items()}
    matrices = {
        # a file cannot have one tensor twice
        name: (whole[_matrix_name("A", source)].clone(), whole[_matrix_name("B", name)])
        for name, (source, _) in everywhere.items()
    }
    return matrices, {name: scaling for name, (_, scaling) in everywhere.items()}


def _whole_shape(share: torch.Tensor, axis: int | None) -> list[int]:
    return [size * (tensor_group().size() if dim == axis else 1) for dim, size in enumerate(share.shape)]


def _gathered(share: torch.Tensor, axis: int | None) -> torch.Tensor:
    if axis is None or tensor_group().size() == 1:
        return share.clone()
    share = share.contiguous()
    shares = [torch.empty_like(share) for _ in range(tensor_group().size())]
    dist.all_gather(shares, share, group=tensor_group())
    return torch.cat(shares, axis)
