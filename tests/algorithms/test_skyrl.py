"""The functions of hpcrl.algorithms give SkyRL's numbers, values and gradients, where SkyRL has the same function.

`skyrl_cases.json` holds inputs and outputs of SkyRL 0b1980b2d. token_mean is the mean over all tokens of the mini-batch, which
is what SkyRL's became later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.algorithms.advantages import grpo
from hpcrl.algorithms.kl import k3
from hpcrl.algorithms.losses import clipped_surrogate, masked_sum

CASES = json.loads((Path(__file__).parent / "skyrl_cases.json").read_text())["cases"]


def cases(function: str) -> list[Any]:
    found = [pytest.param(case, id=case["id"]) for case in CASES if case["fn"] == function]
    assert found, function
    return found


def close(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", cases("advantage.grpo"))
def test_grpo(case: dict[str, Any]) -> None:
    rewards, mask = torch.tensor(case["inputs"]["token_level_rewards"]), torch.tensor(case["inputs"]["response_mask"])
    index = case["inputs"]["index"]
    advantages = torch.zeros(len(index))
    for name in set(index):
        rows = [row for row, group in enumerate(index) if group == name]
        advantages[rows] = grpo(rewards[rows].sum(-1), norm_by_std=case["params"]["grpo_norm_by_std"])
    close(advantages[:, None] * mask, case["outputs"]["advantages"])


@pytest.mark.parametrize("case", cases("policy_loss.regular"))
def test_clipped_surrogate(case: dict[str, Any]) -> None:
    names = ("log_probs", "old_log_probs", "advantages", "loss_mask")
    logprobs, old, advantages, mask = (torch.tensor(case["inputs"][name]).flatten() for name in names)
    logprobs.requires_grad_()
    settings = {name: case["params"][name] for name in ("eps_clip_low", "eps_clip_high")}
    loss, metrics = clipped_surrogate(logprobs, old, advantages, mask, **settings)
    tokens = mask.sum().clamp(min=1)
    mean = masked_sum(loss, mask) / tokens
    mean.backward()
    close(mean.detach(), case["outputs"]["loss"])
    close(metrics["clip_ratio"] / tokens, case["outputs"]["metrics"]["clip_ratio"])
    assert logprobs.grad is not None
    close(logprobs.grad, torch.tensor(case["outputs"]["grad_log_probs"]).flatten().tolist())


@pytest.mark.parametrize("case", cases("kl.token_estimate"))
def test_k3(case: dict[str, Any]) -> None:
    value = k3(torch.tensor(case["inputs"]["log_probs"]), torch.tensor(case["inputs"]["log_probs_base"]))
    close(value, case["outputs"]["kl"])


@pytest.mark.parametrize("case", cases("kl.loss_term"))
def test_k3_gradient(case: dict[str, Any]) -> None:
    """SkyRL takes the mean over each row, then over rows; the estimator underneath and its gradient are the same."""
    logprobs = torch.tensor(case["inputs"]["log_probs"], requires_grad=True)
    mask = torch.tensor(case["inputs"]["loss_mask"])
    values = k3(logprobs, torch.tensor(case["inputs"]["log_probs_base"])) * mask
    mean = (values.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    mean.backward()
    close(mean.detach(), case["outputs"]["policy_kl"])
    assert logprobs.grad is not None
    close(logprobs.grad, case["outputs"]["grad_log_probs_without_no_grad"])


@pytest.mark.parametrize("case", cases("loss.scale_advantages"))
def test_token_mean_over_the_mini_batch(case: dict[str, Any]) -> None:
    """Sums over micro-batches divided once by the mini-batch's tokens: SkyRL's scaling of the advantages, as a gradient."""
    advantages, mask = torch.tensor(case["inputs"]["advantages"]), torch.tensor(case["inputs"]["loss_mask"])
    logprobs = torch.zeros_like(advantages, requires_grad=True)
    bounds = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
    for rows in torch.arange(len(mask)).split(case["params"]["micro_batch_size"]):
        loss, _ = clipped_surrogate(
            logprobs[rows], torch.zeros_like(mask[rows]), advantages[rows], mask[rows], **bounds
        )
        (masked_sum(loss, mask[rows]) / mask.sum()).backward()
    assert logprobs.grad is not None
    close(logprobs.grad, (-torch.tensor(case["outputs"]["scaled_advantages"]) * mask).tolist())
