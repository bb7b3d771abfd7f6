"""Router replay: tokens go to the experts that the engine chose (R3, arXiv:2510.11370)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hpcrl.errors import DataError
from hpcrl.types import ROUTED_EXPERTS, MicroBatch

_OWN = -1  # in place of an expert: the router chooses


def given_experts(batch: MicroBatch, layers: Sequence[int]) -> torch.Tensor | None:
    """Return the engine's experts of the tokens of a micro-batch, [P, L, k] int64; -1 where they are unknown. None: nowhere.

    Args:
        layers: the numbers, from 0, of the L layers of the model that have experts. An engine returns these layers, or all.

    Raises:
        DataError: it returned other layers.
    """
    known = [sample[ROUTED_EXPERTS] for sample in batch.tensors if ROUTED_EXPERTS in sample]
    if not known:
        return None
    told = known[0].shape[1]
    if told != len(layers) and told <= max(layers):
        raise DataError(
            f"samples have experts of {told} layers, and the model has them in {len(layers)}: the engine serves another model"
        )
    parts = [
        sample.get(ROUTED_EXPERTS, known[0].new_full((length, *known[0].shape[1:]), _OWN))
        for sample, length in zip(batch.tensors, batch.lengths, strict=True)
    ]
    given_P = torch.cat(parts).long()
    return given_P if told == len(layers) else given_P[:, list(layers)]


class Chosen(TorchFunctionMode):
    """Overrides `torch.topk` so that a router takes given experts, with their current scores.

    Args:
        given: [N, k] int64; -1 where it chooses.

    Attributes:
        calls: of topk so far.
    """

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self._given, self.calls = given, 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        self.calls += 1
        experts = torch.where(self._given == _OWN, found.indices, self._given)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))
