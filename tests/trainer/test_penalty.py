"""The price of divergence from the reference: its controller keeps its sign and goes on after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.algorithms.kl import adapted
from hpcrl.config import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.trainer.penalty import KlPenalty


def section(**changes: Any) -> AlgorithmConfig:
    control = {"type": "adaptive", "kl_target": 0.1, "horizon": 100}
    return build(AlgorithmConfig, {"use_kl_loss": False, "use_kl_in_reward": True, "kl_ctrl": control, **changes})


@pytest.mark.parametrize("divergence", [0.0, 0.1, 10.0])
def test_a_batch_larger_than_the_horizon_does_not_turn_the_price_around(divergence: float) -> None:
    assert 0.8 <= adapted(1.0, divergence, 1e6, target=0.1, horizon=100) <= 1.2
    assert adapted(1.0, 1.0, 50, target=0.1, horizon=100) == pytest.approx(1.1)


def test_a_restart_goes_on_where_it_was() -> None:
    first = KlPenalty(section(kl_loss_coef=0.5), {})
    first.adapt(1.0, 50)
    assert first.coefficient == pytest.approx(0.55)
    assert KlPenalty(section(kl_loss_coef=0.5), first.carried()).coefficient == first.coefficient


def test_another_start_is_what_a_user_asks_for() -> None:
    first = KlPenalty(section(kl_loss_coef=0.5), {})
    first.adapt(1.0, 50)
    assert KlPenalty(section(kl_loss_coef=0.2), first.carried()).coefficient == 0.2
    fixed = KlPenalty(section(kl_loss_coef=0.5, kl_ctrl={}), first.carried())
    fixed.adapt(1.0, 50)
    assert (fixed.coefficient, fixed.carried()) == (0.5, {})
