"""What follows from the configuration about reward models: the one that is trained, and the one that a run serves or asks somewhere else."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.derive import gpu_count, has_engines, is_offline, reward_weights
from hpcrl.config.sections.environment import REWARD_MODEL, EnvironmentConfig, RemoteRewardConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree

HEAD = "score"
"""Name of the head of transformers' classifiers of causal language models."""


def uses_reward_service(environment: EnvironmentConfig, kind: Literal["train", "eval"]) -> bool:
    """Return whether a reward service scores samples of training or evaluation."""
    return environment.remote_reward.enable and not reward_weights(environment, kind)


def is_rewarded_later(environment: EnvironmentConfig, kind: Literal["train", "eval"]) -> bool:
    """Return whether nothing but a reward model that scores finished groups rewards samples of training; evaluation never waits for one."""
    own = environment.reward_model
    return kind == "train" and own.model is not None and not own.use_environment


def reward_functions(remote: RemoteRewardConfig) -> dict[str, float]:
    """Return the rewards that a service is asked for, with their weights; where they are not set: that of a reward model."""
    return remote.reward_function or ({REWARD_MODEL: 1.0} if remote.service.model else {})


def reward_services(config: ConfigTree) -> int:
    """Return how many processes serve a reward model in a run."""
    kinds: tuple[Literal["train", "eval"], ...] = ("eval",) if is_offline(config.trainer) else ("train", "eval")
    used = has_engines(config) and any(uses_reward_service(config.environment, kind) for kind in kinds)
    service = config.environment.remote_reward.service
    return service.num_services if used and service.model is not None else 0


def services_per_node(config: ConfigTree) -> int:
    """Return how many of them share a node: one for each of its GPUs."""
    return max(1, gpu_count(config.slurm))


def trains_reward_model(trainer: TrainerConfig) -> bool:
    """Return whether what is trained in the policy's place gives one number for a conversation, and generates nothing."""
    return trainer.mode == "reward_model"
