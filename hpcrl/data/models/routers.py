"""Finds the routers of mixtures of experts in transformers' models, and the experts that they choose."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

EXPERT_DTYPE = torch.int16
"""Of the numbers of experts, wherever they are kept."""


def routers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the routers of a model by their names, in the order of its layers; empty: it has no experts, or transformers does not say which module chooses them.

    A router gives logits [N, E] of all experts, and scores [N, k] and indices [N, k] of those that each of its N tokens goes to.
    """
    recorders = getattr(model.base_model, "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits")
    if not isinstance(recorder, OutputRecorder) or recorder.target_class is nn.Linear:
        return {}  # a linear layer gives logits alone: the layer around it chooses, as Jamba's does
    return {name: module for name, module in model.named_modules() if isinstance(module, recorder.target_class)}


class ExpertRecorder:
    """Notes to which experts the tokens of a model's last pass went.

    Args:
        model: has routers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._seen: dict[str, torch.Tensor] = {}
        for name, router in routers(model).items():
            router.register_forward_hook(partial(self._note, name))

    def _note(self, name: str, _module: nn.Module, _inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        self._seen[name] = outputs[2]

    def taken(self, rows: int) -> torch.Tensor:
        """Return the experts of the last pass, which was over [R, Q] tokens: [R, Q, L, k]."""
        return torch.stack(list(self._seen.values()), 1).to(EXPERT_DTYPE).unflatten(0, (rows, -1))
