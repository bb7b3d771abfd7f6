"""Section `vla`: policies that act on images and move robots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.effects import OBJECTIVE, OTHER_MODEL, SAMPLING, WRITTEN
from hpcrl.config.setting import COUNT, POSITIVE, Unimplemented, section, setting


@dataclass(frozen=True, kw_only=True)
class Pi05Config:
    num_steps: int = setting(10, range=COUNT)
    """pi05: steps from noise to a chunk of actions, in training and in evaluation."""

    noise_method: Literal["flow_sde", "flow_cps"] = "flow_sde"
    """pi05: how steps are drawn, so that actions have probabilities. flow_sde: as in Flow-GRPO (arXiv:2505.05470); flow_cps: the share of noise stays as it is (arXiv:2509.05952), and the last step is no draw. Evaluation draws nothing."""

    noise_level: float = setting(0.5, range=POSITIVE)
    """pi05: how much noise a step draws, as the method counts it: more explores more."""


@dataclass(frozen=True, kw_only=True)
class VLAConfig:
    enable: bool = setting(False, on_change=OTHER_MODEL)
    """The policy is a vision-language-action model: what it says are actions of a robot, not text. environment.skyrl_gym.robot says which simulator moves."""

    vla_type: Literal["openvla-oft", "openvla", "pi05", "cosmos-policy"] = setting(
        "openvla",
        on_change=OTHER_MODEL,
        unimplemented=Unimplemented("Cosmos Policy, which Cosmos-RL only evaluates", works=("openvla-oft", "pi05")),
    )
    """How actions are made. openvla: a token for each number, one after the other. openvla-oft: the same tokens, all of a turn in one forward pass. pi05: a chunk of numbers by a flow (section pi05)."""

    num_envs: int | None = setting(None, range=COUNT, on_change=SAMPLING)
    """Simulators that one replica steps at the same time; unset: as many as generator.inference_engine.max_num_seqs."""

    use_proprio: bool = setting(False, on_change=OTHER_MODEL)
    """Show the robot's state to the policy. pi05: in the text; openvla-oft: as a token behind the images, by the model's proprio_projector."""

    save_video: bool = setting(False, on_change=WRITTEN)
    """Write videos of episodes into the run directory; trace_verbosity says of which."""

    continuous: bool = setting(False, on_change=SAMPLING)
    """Begin the next group as soon as there are simulators for it; false: when all groups that were begun together have ended."""

    trace_verbosity: Literal[0, 1, 2] = setting(1, on_change=WRITTEN)
    """Episodes of which save_video writes videos; 0: none, 1: of evaluations, 2: all."""

    unnorm_key: str | None = setting(None, on_change=OBJECTIVE)
    """Dataset whose statistics, `norm_stats` in the model's config.json, turn its outputs into actions; unset: the only one that is there. Where there is none, outputs are the simulator's numbers."""

    norm_type: Literal["bounds_q99", "bounds"] = setting("bounds_q99", on_change=OBJECTIVE)
    """Statistics of unnorm_key that become -1 and 1, of actions and of the state. bounds_q99: the quantiles q01 and q99, as for LIBERO and BridgeData; bounds: min and max, as for ALOHA and RoboTwin."""

    pi05: Pi05Config = section(Pi05Config, on_change=SAMPLING)

    @property
    def moves_by_flow(self) -> bool:
        """Whether the policy is PI0.5, which moves a robot by chunks of numbers that a flow makes."""
        return self.enable and self.vla_type == "pi05"
