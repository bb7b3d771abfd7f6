"""Cosmos-RL's rewards, their weighted sum, and the scores of its reward service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpcrl.algorithms.advantages import ESTIMATORS, Outcomes
from hpcrl.algorithms.filters import filter_values, varied
from hpcrl.algorithms.prefixes import shared_prefixes
from hpcrl.config import AlgorithmConfig, EnvironmentConfig
from hpcrl.config.environment import OverlongRewardConfig, RemoteRewardConfig
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.service import service_rewards, service_scores
from hpcrl.envs.rewards.weighted import REWARDS, WeightedRewards
from hpcrl.types import GroupMeta
from tests.golden.cases import Case


def reward(case: Case) -> dict[str, Any]:
    response = Response(text=case.inputs["to_be_evaluated"], ground_truth=case.inputs["reference"])
    return {"reward": REWARDS[case.fn.removeprefix("reward:")](response, EnvironmentConfig())}


def overlong(case: Case) -> dict[str, Any]:
    settings = {name: case.params[name] for name in ("buffer_length", "penalty_factor")}
    environment = EnvironmentConfig(overlong_reward=OverlongRewardConfig(**settings))
    response = Response(text="", n_tokens=case.inputs["n_tokens"], max_tokens=case.params["max_response_length"])
    return {"reward": REWARDS["overlong"](response, environment)}


def weighted(case: Case) -> dict[str, Any]:
    """A reward that only filters has weight 0 here, as `hpcrl config convert` writes it."""
    named = case.params["reward_function"]
    filters = case.params.get("filter_reward_metric") or []
    rewards = WeightedRewards("", {**dict.fromkeys(filters, 0.0), **named}, EnvironmentConfig())
    truth = case.inputs["reference"]
    turns = [rewards(Response(text=text, ground_truth=truth)) for text in case.inputs["completions"]]
    paid = [turn.reward for turn in turns]
    group = GroupMeta("", "train", 0, "", paid, [], [], [], 0, 0, "", 0.0, [turn.metrics for turn in turns])
    return {"rewards": paid, "filter_rewards": filter_values(group, filters)}


def ends_with(response: Response, _environment: EnvironmentConfig) -> float:
    return float(response.text.endswith(response.ground_truth))


def of_groups(case: Case) -> dict[str, Any]:
    """Characters are tokens."""
    pay = WeightedRewards("", {f"{__name__}:ends_with": 1.0}, EnvironmentConfig())
    algorithm = AlgorithmConfig(grpo_norm_by_std=not case.params["unbiased_advantage"])
    least = case.params["min_filter_prefix_tokens"]
    groups = []
    for completions, truth in case.inputs["groups"]:
        paid = [pay(Response(text=text, ground_truth=truth)).reward for text in completions]
        ones = [1] * len(paid)
        outcomes = Outcomes(torch.tensor(paid), torch.ones(len(paid)), ones, torch.zeros(len(paid), dtype=torch.int64))
        tokens = [[ord(letter) for letter in text] for text in completions]
        found = {
            "rewards": paid,
            "advantages": ESTIMATORS["grpo"](outcomes, algorithm).tolist(),
            "valid": varied(paid),
            "n_ignore_prefix_tokens": [0] * len(paid) if least is None else shared_prefixes(tokens, paid, least),
        }
        groups.append(found)
    return {"groups": groups}


def of_service(case: Case) -> dict[str, Any]:
    config: Mapping[str, Any] = case.params["config"]
    functions = {function["name"]: function for function in config["reward_fns"]}
    scores = {
        name: service_scores(reply, *(function[key] for key in ("score_key", "clip_min", "clip_max")))
        for (name, function), reply in zip(functions.items(), case.inputs["scores"], strict=True)
    }
    weights = {name: function["weight"] for name, function in functions.items()}
    return {"reward": service_rewards(scores, _remote(config, weights))}


def of_service_with_one_function(case: Case) -> dict[str, Any]:
    config = case.params["config"]
    (name,) = config["reward_fn"]
    scores = {name: service_scores(case.inputs["scores"], config["score_key"])}
    return {"reward": service_rewards(scores, _remote(config, config["reward_fn"]))}


def _remote(config: Mapping[str, Any], weights: dict[str, float]) -> RemoteRewardConfig:
    bounds = {"clip_min": config["reward_clip_min"], "clip_max": config["reward_clip_max"]}
    return RemoteRewardConfig(reward_function=weights, scale=config["scale"], **bounds)


ADAPTERS = {
    "reward:overlong": overlong,
    "reward:*": reward,
    "Reward.compute_reward": weighted,
    "LocalRewardCalculator.compute_rewards": of_groups,
    "RemoteRewardCalculator.fetch_reward": of_service,
    "RemoteRewardCalculator.fetch_reward@seed": of_service_with_one_function,
}
