"""Routers of mixtures of experts in transformers' models: which modules they are, and which experts they choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the routers of a model, in the order of its layers; empty: it has no experts, or transformers does not say which module chooses them.

    A router gives logits [N, E] of all experts, and scores [N, k] and indices [N, k] of those that each of its N tokens goes to.
    """
    told = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = told.get("router_logits")
    if not isinstance(recorder, OutputRecorder):
        return []
    return [module for module in model.modules() if isinstance(module, recorder.target_class)]


@contextmanager
def recorded_experts(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Let the experts that tokens go to be known: the list gets a tensor [N, k] of each router's, in each pass one after the other."""
    found = list[torch.Tensor]()

    def note(_module: nn.Module, _inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        found.append(outputs[2])

    handles = [router.register_forward_hook(note) for router in routers(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
