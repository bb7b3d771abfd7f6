"""Section `vla`: policies that see images and move robots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class VLAConfig:
    enable: bool = False
    """The policy is a vision-language-action model: what it says are actions of a robot, not text. environment.skyrl_gym.robot says which simulator moves."""

    vla_type: Literal["openvla-oft", "openvla", "pi05", "cosmos-policy"] = "openvla"
    """How actions are made. openvla: a token for each number, one after the other; openvla-oft: the same tokens, all of a turn in one forward pass in which none is known, by a model with parallel_decoding (trainer.policy.model_config_kwargs)."""

    num_envs: int | None = None
    """Simulators that one replica steps at the same time; unset: as many as generator.inference_engine.max_num_seqs."""

    use_proprio: bool = False
    """Show the robot's state to the policy."""

    proprio_dim: int = 7
    """Numbers in the robot's state, with use_proprio."""

    save_video: bool = False
    """Write videos of episodes into the run directory; trace_verbosity says of which."""

    continuous: bool = False
    """Begin the next group as soon as there are simulators for it; false: when all groups that were begun together have ended."""

    trace_verbosity: Literal[0, 1, 2] = 1
    """Episodes of which save_video writes videos; 0: none, 1: of evaluations, 2: all."""

    unnorm_key: str | None = None
    """Dataset whose statistics, `norm_stats` in the model's config.json, turn its outputs into actions; unset: the only one that is there. Where there is none, outputs are the simulator's numbers."""
