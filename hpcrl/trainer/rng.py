"""Random state of this rank, as tensors."""

from __future__ import annotations

from typing import Protocol

import torch


class RandomGenerator(Protocol):
    """A generator of a backend beside torch's own."""

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, state: torch.Tensor) -> None: ...


_OTHERS: dict[str, RandomGenerator] = {}


def draws_from(name: str, generator: RandomGenerator) -> None:
    """Make a generator's state a part of the random state of this rank.

    Args:
        name: what is saved under another name is not its state.
    """
    _OTHERS[name] = generator


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of the generators that training draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {name: generator.get_state() for name, generator in _OTHERS.items()}


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on from what `random_state` returned, there or on another device."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    for name, generator in _OTHERS.items():
        if name in states:
            generator.set_state(states[name])
