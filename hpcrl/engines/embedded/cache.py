"""Key-value caches of rows that end in the same column, so that one assignment writes a token of each row, and reads need no copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from hpcrl.errors import EngineError

_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}

Part = tuple[torch.Tensor, torch.Tensor, int]
"""A tensor, the rows to take, and how many of its columns are in use."""


def aligned(parts: Sequence[Part], width: int, capacity: int, dim: int) -> torch.Tensor:
    """Return rows of several tensors beside each other, their last columns in column `width - 1`; columns left of them are 0.

    Args:
        capacity: columns of what is returned; those from `width` on hold anything.
        dim: of the columns, 0 or 1; the other one is that of the rows.
    """
    shape = list(parts[0][0].shape)
    shape[1 - dim], shape[dim] = sum(len(index) for _, index, _ in parts), capacity
    found, at = parts[0][0].new_empty(shape), 0
    for tensor, index, used in parts:
        length = min(used, width)
        rows = found.narrow(1 - dim, at, len(index))
        rows.narrow(dim, 0, width - length).zero_()
        wanted = tensor.narrow(dim, used - length, length)
        torch.index_select(wanted, 1 - dim, index, out=rows.narrow(dim, width - length, length))
        at += len(index)
    return found


def expect_attention_only(config: PreTrainedConfig) -> None:
    """Raise EngineError if a model has layers whose state is not a key and a value per token."""
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _KINDS)
    if others:
        raise EngineError(
            f"the embedded engine keeps keys and values of attention only, and {type(config).__name__} has layers of another kind: "
            f"{', '.join(others)}; set generator.inference_engine.backend to vllm"
        )


class _Layer(CacheLayerMixin):
    """Keys and values [C, R, H, D], of which the first `length` columns are in use.

    With columns first a token of all rows is written in one piece, and columns that are not in use yet take no memory on a CPU.
    """

    is_sliding = False  # masks do what a window does; all columns stay

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def _room(self, states: torch.Tensor) -> torch.Tensor:
        rows, heads, _, width = states.shape
        return states.new_empty(self.capacity, rows, heads, width)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of further tokens, [R, H, T, D], and return those of all columns in use, [R, H, C, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self.length = self.length, self.length + key_states.shape[2]
        return self._with(self.keys, begin, key_states), self._with(self.values, begin, value_states)

    def _with(self, kept: torch.Tensor | None, begin: int, states: torch.Tensor) -> torch.Tensor:
        assert kept is not None
        kept[begin : self.length] = states.permute(2, 0, 1, 3)
        return kept[: self.length].permute(1, 2, 0, 3)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class ColumnCache(Cache):
    """Caches of all layers of a model.

    Args:
        layers: of the model.
        capacity: columns that there is room for.
    """

    layers: list[_Layer]

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers=[_Layer(capacity) for _ in range(layers)])

    @property
    def length(self) -> int:
        """Columns in use."""
        return self.layers[0].length

    @classmethod
    def of(cls, parts: Sequence[tuple[ColumnCache, torch.Tensor]], width: int, capacity: int) -> ColumnCache:
        """Return a cache of some rows of others, which are empty afterwards; their last columns are in column `width - 1`."""
        found = cls(len(parts[0][0].layers), capacity)
        for number, layer in enumerate(found.layers):
            olds = [(cache.layers[number], index) for cache, index in parts]
            keys = [(old.keys, index, old.length) for old, index in olds if old.keys is not None]
            values = [(old.values, index, old.length) for old, index in olds if old.values is not None]
            layer.keys, layer.values = aligned(keys, width, capacity, 0), aligned(values, width, capacity, 0)
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.length, layer.is_initialized = width, True
            for old, _ in olds:  # gone before the next layer's are made
                old.keys = old.values = None
        return found

    def rows(self, part: slice) -> ColumnCache:
        """Return the cache of some rows, which shares their memory."""
        found = ColumnCache(len(self.layers), self.layers[0].capacity)
        for layer, own in zip(found.layers, self.layers, strict=True):
            assert own.keys is not None
            assert own.values is not None
            layer.keys, layer.values, layer.length = own.keys[:, part], own.values[:, part], own.length
            layer.dtype, layer.device, layer.is_initialized = own.dtype, own.device, True
        return found

    def release(self) -> None:
        """Free the memory of keys and values; the columns in use stay counted."""
        for layer in self.layers:
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")

    def allocate(self) -> None:
        """Have memory again where it was released; what it holds is to be computed."""
        for layer in self.layers:
            assert layer.keys is not None
            assert layer.values is not None
            if layer.keys.is_meta:
                layer.keys = torch.empty_like(layer.keys, device=layer.device)
                layer.values = torch.empty_like(layer.values, device=layer.device)

    def use(self, length: int) -> None:
        """Set the number of columns in use; later columns are ignored."""
        for layer in self.layers:
            layer.length = length


@dataclass
class CacheColumns:
    """Contents of the rows' columns, [R, C] each, and the caches of all columns in use but the last.

    Attributes:
        tokens: int64; prompts and responses.
        logprobs: float32, of responses.
        versions: int32, that chose it.
        experts: [R, C, L, k] int16, that each token but the last went to; None: nobody asks.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    cache: ColumnCache
    experts: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Columns in use."""
        return self.cache.length + 1

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def of(cls, parts: Sequence[tuple[CacheColumns, torch.Tensor]], width: int, capacity: int) -> CacheColumns:
        """Return rows of others under each other, whose last columns are in column `width - 1`.

        Args:
            parts: others, and which of their rows to take; they are empty afterwards.
        """

        def grid(name: str) -> torch.Tensor:
            found = [(getattr(part, name), index, part.width) for part, index in parts]
            return aligned(found, width, capacity, 1)

        tokens, logprobs, versions = grid("tokens"), grid("logprobs"), grid("versions")
        experts = grid("experts") if parts[0][0].experts is not None else None
        cache = ColumnCache.of([(part.cache, index) for part, index in parts], width - 1, capacity)
        return cls(tokens, logprobs, versions, cache, experts)
