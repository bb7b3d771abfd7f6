"""Cosmos-RL's advantages of one group."""

from __future__ import annotations

from typing import Any

import torch

from hpcrl.algorithms.advantages import Outcomes, grpo
from hpcrl.config import AlgorithmConfig
from tests.golden.cases import Case


def group(case: Case) -> dict[str, Any]:
    rewards_B = torch.tensor(case.inputs["rewards"], dtype=torch.float64)
    size = len(rewards_B)
    outcomes = Outcomes(rewards_B, torch.ones_like(rewards_B), [1] * size, torch.zeros(size, dtype=torch.int64))
    return {"advantages": grpo(outcomes, AlgorithmConfig(grpo_norm_by_std=not case.params["unbiased"]))}


ADAPTERS = {"GRPO.compute_advantage": group}
