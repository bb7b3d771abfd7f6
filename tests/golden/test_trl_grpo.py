"""Losses and advantages against TRL's: vespo, luspo, which is gspo with another reduction, and gdpo (trl_grpo.py asked TRL)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hpcrl.algorithms.advantages import AdvantageInputs, gdpo
from hpcrl.algorithms.losses import LossTokens, Values, gspo, vespo
from tests.golden.trl_grpo import PLACE

GOLDEN: dict[str, Any] = json.loads(PLACE.read_text())


def computed(tokens: LossTokens, settings: dict[str, Any]) -> tuple[Values, float]:
    """Return the loss per token, and the weight of each: 1 / tokens, or 1 / samples."""
    if settings["loss_type"] == "luspo":
        low, high = settings["epsilon"], settings["epsilon_high"]
        return gspo(tokens, eps_clip_low=low, eps_clip_high=high), 1 / len(tokens.lengths)
    names = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    own = {name: settings.get(f"vespo_{name}", value) for name, value in names.items()}
    return vespo(tokens, **own), 1 / tokens.mask.sum().item()


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    case, mask = GOLDEN["cases"][name], torch.tensor(GOLDEN["mask"])
    rows, columns = mask.shape
    leaf = torch.tensor(GOLDEN["logprobs"]).requires_grad_()
    advantages = torch.tensor(GOLDEN["advantages"]).repeat_interleave(columns)
    old = torch.tensor(GOLDEN["old"]).flatten()
    tokens = LossTokens(leaf.flatten(), old, old, advantages, mask.flatten(), torch.tensor([columns] * rows))
    (loss_P, _), weight = computed(tokens, case["settings"])
    loss = (loss_P * tokens.mask).sum() * weight
    loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.tensor(case["expected"]["gradient"]), rtol=1e-5, atol=1e-7)
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-5)


def test_advantages_of_several_rewards_are_those_of_trl() -> None:
    told = GOLDEN["gdpo"]
    named = {name: torch.tensor(values, dtype=torch.float64) for name, values in told["rewards"].items()}
    count = len(told["advantages"])
    ones = torch.ones(count, dtype=torch.float64)
    groups = torch.arange(count) // told["group"]
    found = gdpo(AdvantageInputs(ones, ones, [1] * count, groups, named_B=named), rewards=told["weights"])
    assert all(len(set(values)) > 1 for values in told["rewards"].values())
    # TRL adds 1e-4 to both deviations, hpcrl 1e-6 to the first
    torch.testing.assert_close(found, torch.tensor(told["advantages"], dtype=torch.float64), rtol=2e-3, atol=1e-3)
