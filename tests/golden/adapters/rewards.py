"""Cosmos-RL's rewards, their weighted sum, the scores of its reward service, and what the completions of a group have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.algorithms.filters import filter_values, varied
from hpcrl.algorithms.prefixes import maximal_prefixes, shared_prefixes
from hpcrl.config import EnvironmentConfig
from hpcrl.config.sections.environment import RemoteRewardConfig
from hpcrl.envs.rewards.remote import service_rewards, service_scores
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.weighted import REWARDS, WeightedRewards
from tests.golden.adapters.advantages import group_advantages
from tests.golden.adapters.converted import cosmos
from tests.golden.case import Case
from tests.rows import group_meta

_POLICY = "train.train_policy"


def reward(case: Case) -> dict[str, Any]:
    response = Response(text=case.inputs["to_be_evaluated"], ground_truth=case.inputs["reference"])
    return {"reward": REWARDS[case.fn.removeprefix("reward:")](response, EnvironmentConfig())}


def overlong(case: Case) -> dict[str, Any]:
    settings = {f"{_POLICY}.overlong_reward.{name}": case.params[name] for name in ("buffer_length", "penalty_factor")}
    named = {f"{_POLICY}.reward_function": ["overlong"], f"{_POLICY}.overlong_reward.enable_overlong_penalty": True}
    environment = cosmos({**named, **settings}).environment
    response = Response(text="", n_tokens=case.inputs["n_tokens"], max_tokens=case.params["max_response_length"])
    return {"reward": REWARDS["overlong"](response, environment)}


def weighted(case: Case) -> dict[str, Any]:
    named, filters = case.params["reward_function"], case.params.get("filter_reward_metric")
    filtering = {f"{_POLICY}.variant": "dapo", f"{_POLICY}.filter_reward_metric": filters}
    config = cosmos({f"{_POLICY}.reward_function": named, **filtering})
    rewards = WeightedRewards("", config.environment.reward_function, config.environment)
    truth = case.inputs["reference"]
    turns = [rewards(Response(text=text, ground_truth=truth)) for text in case.inputs["completions"]]
    paid = [turn.reward for turn in turns]
    group = group_meta(
        rewards=paid, lengths=[1] * len(paid), response_lengths=[1] * len(paid), stop_reasons=["stop"] * len(paid),
        env_metrics=[turn.metrics for turn in turns],
    )  # fmt: skip
    return {"rewards": paid, "filter_rewards": filter_values(group, config.trainer.algorithm.filter_reward_metric)}


def ends_with(response: Response, _environment: EnvironmentConfig) -> float:
    return float(response.text.endswith(response.ground_truth))


def of_groups(case: Case) -> dict[str, Any]:
    """Characters are tokens."""
    pay = WeightedRewards("", {f"{__name__}:ends_with": 1.0}, EnvironmentConfig())
    names = ("unbiased_advantage", "min_filter_prefix_tokens")
    algorithm = cosmos({f"{_POLICY}.{name}": case.params[name] for name in names}).trainer.algorithm
    least = algorithm.min_filter_prefix_tokens
    groups = []
    for completions, truth in case.inputs["groups"]:
        paid = [pay(Response(text=text, ground_truth=truth)).reward for text in completions]
        tokens = [[ord(letter) for letter in text] for text in completions]
        found = {
            "rewards": paid,
            "advantages": group_advantages(paid, algorithm).tolist(),
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


def prefixes(case: Case) -> dict[str, Any]:
    """Without a number of tokens nothing is searched for."""
    responses, least = case.inputs["seqs"], case.params["N"]
    found = [] if least is None else maximal_prefixes(responses, least)
    return {"groups": [[responses[members[0]][:length], members] for length, members in found]}


ADAPTERS = {
    "reward:overlong": overlong,
    "reward:*": reward,
    "Reward.compute_reward": weighted,
    "LocalRewardCalculator.compute_rewards": of_groups,
    "RemoteRewardCalculator.fetch_reward": of_service,
    "RemoteRewardCalculator.fetch_reward@seed": of_service_with_one_function,
    "find_maximal_prefix_groups": prefixes,
}
