"""Section `vla`: policies that see images and move robots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class VLAConfig:
    enable: bool = False
    """The policy is a vision-language-action model in a simulator."""

    vla_type: Literal["openvla-oft", "openvla", "pi05", "cosmos-policy"] = "openvla-oft"
    """Family of the model."""

    num_envs: int = 1
    """Simulators that one replica steps at the same time."""

    use_proprio: bool = False
    """Show the robot's state to the policy."""

    proprio_dim: int = 7
    """Numbers in the robot's state, with use_proprio."""

    num_images_in_input: int = 1
    """Camera images per step."""

    training_chunk_size: int = 16
    """Action chunks per forward and backward pass."""

    save_video: bool = False
    """Write videos of evaluations into the run directory."""

    continuous: bool = False
    """Start the next episode as soon as one ends, instead of waiting for all simulators."""

    trace_verbosity: Literal[0, 1, 2] = 1
    """Episodes that are traced; 0: none, 1: of evaluations, 2: all."""

    unnorm_key: str = "libero_10_no_noops"
    """Dataset whose statistics, which lie beside the model, turn its outputs into actions."""

    max_steps: int | None = None
    """Steps of an episode at most; unset: the simulator's own bound."""
