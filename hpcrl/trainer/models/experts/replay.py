"""Router replay: tokens go to the experts that the engine took them to (R3, arXiv:2510.11370)."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hpcrl.errors import DataError
from hpcrl.types import ROUTED_EXPERTS, MicroBatch

_OWN = -1  # in place of an expert: the router chooses


def given_experts(batch: MicroBatch, layers: int) -> torch.Tensor | None:
    """Return the experts that the engine took the tokens of a micro-batch to, [P, L, k] int64; -1 where it does not say. None: nowhere.

    Raises:
        DataError: it tells of another number of layers than `layers`.
    """
    known = [sample[ROUTED_EXPERTS] for sample in batch.tensors if ROUTED_EXPERTS in sample]
    if not known:
        return None
    if known[0].shape[1] != layers:
        raise DataError(
            f"samples tell of experts in {known[0].shape[1]} layers, and the model has them in {layers}: the engine serves another model"
        )
    parts = [
        sample.get(ROUTED_EXPERTS, known[0].new_full((length, *known[0].shape[1:]), _OWN))
        for sample, length in zip(batch.tensors, batch.lengths, strict=True)
    ]
    return torch.cat(parts).long()


class Chosen(TorchFunctionMode):
    """Lets the `torch.topk` by which a router chooses give experts that were chosen before, with their scores of now: its own code does the rest.

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
