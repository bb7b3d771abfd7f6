"""The adapter of one of Megatron-core's linear layers, which may hold several of transformers' layers: query, key and value, or gate and up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.nn.functional import linear, rms_norm

from hpcrl.trainer.backends.megatron.names import ADAPTER, Slot
from hpcrl.trainer.backends.megatron.process_groups import expert_tensor_group, tensor_group
from hpcrl.trainer.models.adapter import Adapted

Matrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""A and B, whole, by name of transformers' layer."""


class LayerAdapter(nn.Module):
    """Adapter of a linear layer: s B A x is added to the output, for the rows of each of transformers' layers in it.

    Where ranks share the layer's rows, each has those rows of B, and all of A; it computes A x of its own tokens. Where more ranks than groups
    of queries share them, each has all of B. Where ranks share columns, each has those of A, and all of B.

    The ranks that share an expert compute with the same tokens, and Megatron-core adds up their outputs and gradients outside of it.

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
        first: Matrices,
        config: TransformerConfig,
        dropout: float,
        *,
        shared: bool,
    ) -> None:
        super().__init__()
        self.by_rows, self.of_expert, self.enabled = slot.dim == 0, slot.expert is not None, True
        self.group = expert_tensor_group() if self.of_expert else tensor_group()
        rank, ranks = self.group.rank(), self.group.size()
        shared = shared or self.of_expert  # as PEFT's are
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
            for letter, matrix in zip("AB", (adapted[name].A, adapted[name].B), strict=True):
                if letter == "B" or self.source[name] == name:
                    self._add(letter, name, first[name], matrix.requires_grad, config)

    def _share(self, letter: str, name: str, matrices: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        A, B = matrices
        if letter == "A":
            return A if self.by_rows else A.chunk(self.group.size(), 1)[self.group.rank()]
        return B[self._rows[name].start : self._rows[name].stop] if self._even else B

    def _add(
        self, letter: str, name: str, first: tuple[torch.Tensor, torch.Tensor], trained: bool, config: TransformerConfig
    ) -> None:
        value = self._share(letter, name, first)
        value = value.to(torch.cuda.current_device(), config.params_dtype, copy=True).contiguous()
        parameter: Any = nn.Parameter(value, requires_grad=trained)
        axis = self.axis(letter)
        if axis is not None or (self.of_expert and self.group.size() == 1):  # the norm counts what each rank has
            set_tensor_model_parallel_attributes(parameter, True, axis or 0, 1)
        if self.of_expert:
            parameter.allreduce = False  # as hpcrl.trainer.backends.megatron.models marks experts
        elif axis is None:  # a rank's gradient is that of its tokens
            parameter.sequence_parallel = config.sequence_parallel
        self.register_parameter(attribute(letter, name), parameter)

    def axis(self, letter: str) -> int | None:
        """Return the dimension along which ranks split a matrix; None: each rank has the whole matrix."""
        if self.by_rows:
            return 0 if letter == "B" and self._even else None
        return 1 if letter == "A" else None

    def matrices(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield A or B, the layer of transformers, and this rank's share of the matrix."""
        for letter, names in (("A", [name for name in self.layers if self.source[name] == name]), ("B", self.layers)):
            for name in names:
                yield letter, name, self.get_parameter(attribute(letter, name))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [P, 1, rows] for the input of the layer, [P, 1, columns], with the shares of tokens, rows and columns that the layer has.

        An expert's are [P, columns] and [P, rows].
        """
        if self.of_expert:
            (A,) = (self._of_all(matrix, "A") for letter, _, matrix in self.matrices() if letter == "A")
            low = linear(hidden, A)
            return self._in_order(lambda _, B: linear(low, self._of_all(B, "B")), low)
        found = [(name, matrix) for letter, name, matrix in self.matrices() if letter == "A"]
        low = linear(self._dropout(hidden), torch.cat([A for _, A in found]))
        # under tensor parallelism, tokens are always shared too (sequence parallelism)
        exchange: Any = (
            gather_from_sequence_parallel_region if self.by_rows else reduce_scatter_to_sequence_parallel_region
        )
        parts = exchange(low, group=tensor_group()).split([len(A) for _, A in found], -1)
        lows = dict(zip((name for name, _ in found), parts, strict=True))
        return self._in_order(lambda name, B: linear(lows[self.source[name]], B), lows[self.layers[0]])

    def _of_all(self, matrix: torch.Tensor, letter: str) -> torch.Tensor:
        """Return an expert's matrix; its gradient is summed over the ranks that have copies."""
        replicated = self.axis(letter) is None
        return copy_to_tensor_model_parallel_region(matrix, group=self.group) if replicated else matrix

    @torch.no_grad()
    def begin_as(self, values: Matrices, weight: torch.Tensor) -> None:
        """Set A and B, and subtract s B A from the layer's weight."""
        for letter, name, matrix in self.matrices():
            matrix.copy_(self._share(letter, name, values[name]))
        weight.copy_(weight.float() - self.added(weight))

    def added(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of s B A, float32, for that of W."""
        of = {name: matrix.detach().float() for letter, name, matrix in self.matrices() if letter == "A"}
        added = self._in_order(lambda name, B: of[self.source[name]].t() @ B.detach().float().t(), weight.float().t())
        return added.t()

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
        return together if self._order is None else together.index_select(-1, self._order.to(together.device))


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


def attribute(letter: str, name: str) -> str:
    return f"lora_{letter}_{name.rpartition('.')[2]}"


class ExpertAdapters(nn.ModuleList):
    """Adapters of all experts of a rank, which TransformerEngine has as one layer with a weight for each."""

    @property
    def enabled(self) -> bool:
        return all(adapter.enabled for adapter in self)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return [P, rows] for [P, columns], of which the first tokens are those of the first expert."""
        parts = zip(self, hidden.split(counts), strict=True)
        return torch.cat([adapter(part) for adapter, part in parts])


def attach(adapter: LayerAdapter | ExpertAdapters, layer: nn.Module) -> None:
    """Add the output of an adapter to that of a linear layer."""
    layer.add_module(ADAPTER, adapter)
    layer.register_forward_hook(_add_output)


def _add_output(
    layer: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    adapter = layer.get_submodule(ADAPTER)
    if not adapter.enabled:
        return output
    hidden, *counts = inputs  # of grouped experts, how many tokens each has
    norm = getattr(layer, "layer_norm_weight", None)
    if norm is not None:  # TransformerEngine's layers hold the norm before them
        hidden = rms_norm(hidden, norm.shape, norm, layer.eps)
    result, bias = output
    return result + adapter(hidden, *counts), bias


def adapted_weights(chunks: Sequence[nn.Module]) -> Iterator[tuple[nn.Parameter, LayerAdapter]]:
    """Yield the weights of this rank that have adapters, with them."""
    for chunk in chunks:
        for module in chunk.modules():
            adapter = module._modules.get(ADAPTER)
            if isinstance(adapter, LayerAdapter):
                yield module.get_parameter("weight"), adapter
            elif isinstance(adapter, ExpertAdapters):
                for number, one in enumerate(adapter):
                    assert isinstance(one, LayerAdapter)
                    yield module.get_parameter(f"weight{number}"), one
