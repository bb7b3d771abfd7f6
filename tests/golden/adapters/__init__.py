"""From the calls of other frameworks to hpcrl's own functions.

An adapter takes a case and returns hpcrl's outputs under the case's names; outputs that the case does not have are ignored. It
translates names and layouts and contains no mathematics. What hpcrl refuses, it raises. Heavy imports belong inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from tests.golden.adapters import (
    actions,
    advantages,
    config,
    cosmos_losses,
    diffusion,
    distillation,
    logprobs,
    lora,
    partitions,
    rewards,
    rollout,
    sampling,
    skyrl_losses,
    steps,
)
from tests.golden.case import Case

Adapter = Callable[[Case], Mapping[str, Any]]

ADAPTERS: dict[str, Adapter] = {
    **advantages.ADAPTERS,
    **config.ADAPTERS,
    **cosmos_losses.ADAPTERS,
    **actions.ADAPTERS,
    **diffusion.ADAPTERS,
    **distillation.ADAPTERS,
    **logprobs.ADAPTERS,
    **lora.ADAPTERS,
    **partitions.ADAPTERS,
    **rewards.ADAPTERS,
    **rollout.ADAPTERS,
    **sampling.ADAPTERS,
    **skyrl_losses.ADAPTERS,
    **steps.ADAPTERS,
}
"""Patterns on `fn` to adapters; the first that matches counts."""


def adapter_of(fn: str) -> Adapter | None:
    """Return the adapter of a function, or None where there is none yet."""
    return next((adapter for pattern, adapter in ADAPTERS.items() if fnmatchcase(fn, pattern)), None)
