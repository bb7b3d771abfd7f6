"""Rules about what scores a response: an environment, named rewards, a reward service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcrl.config.derive import eval_sampling, reward_weights
from hpcrl.config.environment import REWARDS, OverlongRewardConfig
from hpcrl.config.own import misnamed
from hpcrl.config.problem import Problem

if TYPE_CHECKING:
    from hpcrl.config.root import Config

_WEIGHTS = ("reward_function", "eval_reward_function")


def reward_names(config: Config) -> Iterator[Problem]:
    for setting in _WEIGHTS:
        weights = getattr(config.environment, setting)
        for name in weights:
            yield from misnamed(f"environment.{setting}", name, REWARDS, "names of")
        if weights and not any(weights.values()):
            yield Problem(
                f"environment.{setting}",
                "every weight is 0, and so would be every reward; give one of them another weight",
            )


def filter_metrics(config: Config) -> Iterator[Problem]:
    rewards = reward_weights(config.environment, "train")
    unknown = [name for name in config.trainer.algorithm.filter_reward_metric if name not in rewards]
    if rewards and unknown:
        yield Problem(
            "trainer.algorithm.filter_reward_metric",
            f'"{unknown[0]}" is not in environment.reward_function, whose rewards are {", ".join(rewards)}; '
            "list it there, with weight 0 if it is not to pay",
        )


def who_pays(config: Config) -> Iterator[Problem]:
    environment = config.environment
    if environment.reward_function and environment.env_class is not None:
        yield Problem(
            "environment.env_class",
            f"environment.reward_function pays in its place, so that {environment.env_class} has no effect; leave one of them out (environment.env_class= takes it back)",
        )


def overlong(config: Config) -> Iterator[Problem]:
    environment, path = config.environment, "environment.overlong_reward"
    listed = [kind for kind in ("train", "eval") if "overlong" in reward_weights(environment, kind)]
    changed = [name for name, value in vars(environment.overlong_reward).items() if value != _default(name)]
    if changed and not listed:
        yield Problem(
            f"{path}.{changed[0]}",
            "has no effect without overlong in environment.reward_function; list it there, or leave this out",
        )
    longest = {"train": config.generator.sampling_params, "eval": eval_sampling(config.generator)}
    for kind in listed:
        most = longest[kind].max_generate_length
        if environment.overlong_reward.buffer_length > most:
            section = "sampling_params" if kind == "train" else "eval_sampling_params"
            yield Problem(
                f"{path}.buffer_length",
                f"expected at most the longest response (generator.{section}.max_generate_length = {most}), "
                f"found {environment.overlong_reward.buffer_length}",
            )
            return


def _default(name: str) -> float:
    return getattr(OverlongRewardConfig(), name)


def remote_reward(config: Config) -> Iterator[Problem]:
    remote = config.environment.remote_reward
    if remote.enable and not remote.reward_function:
        yield Problem(
            "environment.remote_reward.reward_function",
            "required with environment.remote_reward.enable: the rewards that the service computes, with their weights",
        )
    if remote.clip_min > remote.clip_max:
        yield Problem(
            "environment.remote_reward.clip_min",
            f"expected at most clip_max ({remote.clip_max}), found {remote.clip_min}",
        )
