"""SkyRL's KL divergence in the reward: each row becomes a sample of one prompt token and the row's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpcrl.config import AlgorithmConfig, Config
from hpcrl.trainer.packing import Row
from hpcrl.trainer.penalty import KlPenalty
from hpcrl.trainer.plan import Pick
from hpcrl.types import Sample
from tests.golden.cases import Case


def _algorithm(params: Mapping[str, Any]) -> AlgorithmConfig:
    control = {"type": params.get("type") or params["kl_ctrl.type"]}
    control |= {name: params[name] for name in ("kl_target", "horizon")}
    estimate = {name: params[name] for name in ("kl_estimator_type",) if name in params}
    switches = {"use_kl_loss": False, "use_kl_in_reward": True, "kl_loss_coef": params["kl_loss_coef"]}
    required: dict[str, Any] = {
        "data": {"train_data": ["prompts.parquet"], "val_data": ["prompts.parquet"]},
        "trainer": {"policy": {"model": {"path": "model"}}},
    }
    required["trainer"]["algorithm"] = {**switches, **estimate, "kl_ctrl": control}
    return Config.from_dict(required).trainer.algorithm


def controller(case: Case) -> dict[str, Any]:
    charging, values = KlPenalty(_algorithm(case.params), {}), []
    for divergence, samples in case.inputs["updates"]:
        charging.adapt(divergence, samples)
        values.append(charging.coefficient)
    return {"values": values}


def penalty(case: Case) -> dict[str, Any]:
    names = ("rewards", "loss_mask", "action_log_probs", "base_action_log_probs")
    rows = [_row(*parts) for parts in zip(*(case.inputs[name] for name in names), strict=True)]
    charging = KlPenalty(_algorithm(case.params), {})
    metrics = charging.charge(rows, list)
    return {
        "rewards": [row.rewards[1:].tolist() for row in rows],
        "metrics": metrics,
        "controller_value_after": charging.coefficient,
    }


def _row(rewards: Sequence[float], mask: Sequence[float], old: Sequence[float], reference: Sequence[float]) -> Row:
    zeros = torch.zeros(len(mask) + 1)
    sample = Sample(
        token_ids=zeros.long(),
        loss_mask=torch.tensor([0.0, *mask]),
        rollout_logprobs=zeros,
        versions=zeros.int(),
        rewards=torch.tensor([0.0, *rewards]),
        stop_reason="stop",
    )
    row = Row(sample, Pick(0, 0, len(zeros)))
    row.old_logprobs, row.ref_logprobs = torch.tensor([*old, 0.0]), torch.tensor([*reference, 0.0])
    return row


ADAPTERS: dict[str, Callable[[Case], Mapping[str, Any]]] = {
    "kl.controller": controller,
    "reward.kl_penalty": penalty,
}
