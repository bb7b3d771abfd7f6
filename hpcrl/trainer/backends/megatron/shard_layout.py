"""Layout of a rank's Megatron parameters as shards of the tensors of transformers' model in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn

from hpcrl.trainer.backends.megatron.adapters.layer import LayerAdapter, adapted_weights
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.names import Block, LocalWeight, Slot, local_weights, name_in_memory, slots
from hpcrl.trainer.backends.megatron.weights import share_of
from hpcrl.trainer.backends.shards import Shard


@dataclass(frozen=True)
class ShardRectangle:
    """A rectangle of a parameter, and its offsets in a tensor of transformers' model.

    Attributes:
        name: of that tensor.
        shape: of that tensor: one, two or, of experts, three dimensions.
        origin: offsets of the rectangle in that tensor.
        start: offset in the flattened parameter.
        rows, columns: size in the parameter.
        stride: from one row to the next, in the parameter.
        transposed: rows are columns of that tensor.
        copy: another rank writes it.
    """

    name: str
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    start: int
    rows: int
    columns: int
    stride: int
    transposed: bool = False
    copy: bool = False

    def shards(self, values: torch.Tensor, first: int) -> Iterator[Shard]:
        """Yield the shards in a range of the flattened parameter: at most three, which are views.

        Args:
            values: [n], numbers `first` to `first + n` of the flattened parameter.
        """
        begin, end = (self._before(offset) for offset in (first, first + len(values)))
        for row, column, rows, columns in _rectangles(begin, end, self.columns):
            at = self.start + row * self.stride + column - first
            view = values[at:].as_strided((rows, columns), (self.stride, 1))
            yield self._shard(row, column, view)

    def _before(self, offset: int) -> int:
        """Return how many of the rectangle's numbers come before an offset of the flattened parameter."""
        row, column = divmod(max(offset - self.start, 0), self.stride)
        return min(row * self.columns + min(column, self.columns), self.rows * self.columns)

    def _shard(self, row: int, column: int, view: torch.Tensor) -> Shard:
        if len(self.shape) == 1:
            return Shard((self.origin[0] + row,), view[:, 0])
        if self.transposed:
            row, column, view = column, row, view.t()
        *expert, top, left = self.origin
        return Shard((*expert, top + row, left + column), view[None] if expert else view)


def _rectangles(begin: int, end: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the rectangles that numbers `begin` to `end` of a matrix with so many columns form: row, column, rows and columns."""
    row, column = divmod(begin, columns)
    last, rest = divmod(end, columns)
    if row == last:
        if rest > column:
            yield row, column, 1, rest - column
        return
    if column:
        yield row, column, 1, columns - column
        row += 1
    if last > row:
        yield row, 0, last - row, columns
    if rest:
        yield last, 0, 1, rest


def shard_layout(chunks: Sequence[GPTModel], architecture: Architecture) -> dict[nn.Parameter, list[ShardRectangle]]:
    """Return the layout of the parameters of this rank, its adapters included.

    Args:
        chunks: the rank's pipeline stages, bare: without wrappers.
    """
    table, layout = slots(architecture), dict[nn.Parameter, list[ShardRectangle]]()
    for weight in local_weights(chunks, architecture):
        layout.setdefault(weight.parameter, []).extend(_of_weight(weight, table[weight.name], architecture))
    for _, adapter in adapted_weights(chunks):
        for letter, name, matrix in adapter.matrices():
            names = [each for each, source in adapter.source.items() if source == name] if letter == "A" else [name]
            layout[matrix] = [_of_adapter(letter, names, matrix, adapter, architecture)]
    return layout


def _of_weight(weight: LocalWeight, slot: Slot, architecture: Architecture) -> Iterator[ShardRectangle]:
    parameter, (rank, ranks), at = weight.parameter, share_of(slot), 0
    for block in slot.share(rank, ranks):
        length = block.stop - block.start
        name, shape, origin = _in_memory(block, slot, architecture)
        if weight.expert is None:
            stride = parameter.shape[1] if parameter.dim() == 2 else 1
            start, rows, columns = (at * stride, length, stride) if slot.dim == 0 else (at, len(parameter), length)
        else:  # all experts of the rank lie in the parameter, each as [input, output]
            stride, inputs = (weight.within(parameter).shape[dim] for dim in (0, 1))
            start = weight.expert * inputs * stride
            rows, columns = (inputs, length) if slot.dim == 0 else (length, stride)
            start += at if slot.dim == 0 else at * stride
        transposed = weight.expert is not None
        yield ShardRectangle(name, shape, origin, start, rows, columns, stride, transposed, weight.copy)
        at += length


def _in_memory(block: Block, slot: Slot, architecture: Architecture) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    shape, name = slot.tensors[block.name], name_in_memory(block.name)
    origin = [0] * len(shape)
    origin[slot.dim] = block.start
    if slot.expert is not None:  # experts are one tensor, in which the gate comes before what is gated
        names = list(slot.tensors)
        origin[0] += sum(slot.tensors[each][0] for each in names[: names.index(block.name)])
        rows = sum(each[0] for each in slot.tensors.values())
        shape, origin = (architecture.transformer["num_moe_experts"], rows, *shape[1:]), [slot.expert, *origin]
    return architecture.own_name(name), tuple(shape), tuple(origin)


def _of_adapter(
    letter: str, names: Sequence[str], matrix: nn.Parameter, adapter: LayerAdapter, architecture: Architecture
) -> ShardRectangle:
    """Return the rectangle of an adapter's matrix; one that several layers share has all their names, and an expert's has the expert's."""
    prefix, leaves = names[0].rpartition(".")[0], "+".join(name.rpartition(".")[2] for name in names)
    name = architecture.own_name(f"{prefix}.{leaves}.lora_{letter}.default.weight")
    shape, origin, (rows, columns), axis = list(matrix.shape), [0, 0], matrix.shape, adapter.axis(letter)
    if axis is not None:
        origin[axis] = adapter.group.rank() * shape[axis]
        shape[axis] *= adapter.group.size()
    return ShardRectangle(name, tuple(shape), tuple(origin), 0, rows, columns, columns)
