"""From the calls of other frameworks to hpcrl's own functions.

An adapter takes a case and returns hpcrl's outputs under the case's names; outputs that the case does not have are ignored. It
translates names and layouts and contains no mathematics. What hpcrl refuses, it raises. Heavy imports belong inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from tests.golden.adapters import (
    cosmos_advantages,
    cosmos_config,
    cosmos_losses,
    distillation,
    kl_penalty,
    logprobs,
    partitions,
    prefixes,
    rewards,
    rollout,
    sampling,
    skyrl_advantages,
    skyrl_config,
    skyrl_critic,
    skyrl_losses,
    steps,
)
from tests.golden.cases import Case

Adapter = Callable[[Case], Mapping[str, Any]]

ADAPTERS: dict[str, Adapter] = {
    **cosmos_advantages.ADAPTERS,
    **cosmos_config.ADAPTERS,
    **cosmos_losses.ADAPTERS,
    **distillation.ADAPTERS,
    **kl_penalty.ADAPTERS,
    **logprobs.ADAPTERS,
    **partitions.ADAPTERS,
    **prefixes.ADAPTERS,
    **rewards.ADAPTERS,
    **rollout.ADAPTERS,
    **sampling.ADAPTERS,
    **skyrl_advantages.ADAPTERS,
    **skyrl_config.ADAPTERS,
    **skyrl_critic.ADAPTERS,
    **skyrl_losses.ADAPTERS,
    **steps.ADAPTERS,
}
"""Patterns on `fn` to adapters; the first that matches counts."""


def adapter_of(fn: str) -> Adapter | None:
    """Return the adapter of a function, or None where there is none yet."""
    return next((adapter for pattern, adapter in ADAPTERS.items() if fnmatchcase(fn, pattern)), None)
