"""Adam as the configuration sets it, and the scale of losses whose gradients are computed in float16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpcrl.config.sections.model import OptimizerConfig

_FIRST, _GROWS_AFTER = 2.0**16, 2000


def adam_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return what torch.optim.Adam is made with."""
    return {
        "lr": optimizer.lr,
        "betas": tuple(optimizer.adam_betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "decoupled_weight_decay": optimizer.name == "AdamW",
        "fused": optimizer.implementation == "fused",
        "foreach": optimizer.implementation == "foreach",
    }


@dataclass
class LossScale:
    """What the loss is multiplied by before its backward pass, so that small gradients do not become 0 in float16.

    It follows whether gradients are finite, as torch.amp.GradScaler's does, with its values: halved after a step whose gradients are not,
    doubled after 2,000 steps whose gradients were (P. Micikevicius et al., arXiv:1710.03740, section 3.2). Gradients are summed over ranks
    before their norm is taken, so that all ranks see the same.

    Attributes:
        changes: it follows; otherwise it is 1 for good.
        value: a power of two, 1 at least.
        steps: with finite gradients since it changed.
    """

    changes: bool
    value: float = 1.0
    steps: int = 0

    @classmethod
    def of(cls, param_dtype: str) -> LossScale:
        """Return the scale that training in this number type begins with."""
        return cls(True, _FIRST) if param_dtype == "fp16" else cls(False)

    def follow(self, finite: bool) -> None:
        """Take notice of a step."""
        if not self.changes:
            return
        self.steps = self.steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2.0)
        elif self.steps == _GROWS_AFTER:
            self.value, self.steps = self.value * 2.0, 0

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has of it: nothing where it does not change."""
        return {"loss_scale": torch.tensor([self.value, self.steps])} if self.changes else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint has of it."""
        if self.changes:
            value, steps = state["loss_scale"].tolist()
            self.value, self.steps = value, int(steps)
