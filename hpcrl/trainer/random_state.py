"""The random state of this rank, as tensors."""

from __future__ import annotations

import torch


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of the generators that training draws from."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {})


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on from what `random_state` returned, there or on another device."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
