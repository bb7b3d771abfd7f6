"""Section `trainer.dpo`: losses of pairs of a chosen and a rejected answer. Names: TRL's."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.setting import POSITIVE, Range, setting, when

PREFERENCE_LOSSES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "bco_pair", "nca_pair", "apo_zero", "apo_down"),
    "sft",
)
"""Losses by their names; docs/learning_from_datasets.md has their formulas."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    beta: float = setting(0.1, range=POSITIVE)
    """How closely the policy keeps to the reference: rewards are beta times the log-ratio of policy and reference. With loss_type ipo the τ of its paper."""

    loss_type: list[str] = setting(["sigmoid"])
    """Losses that are added up. sigmoid, sigmoid_norm, hinge, ipo, robust, bco_pair, nca_pair, apo_zero and apo_down are means over pairs. sft is the cross entropy of the chosen answers, a mean over their tokens."""

    loss_weights: list[float] = setting([])
    """Weight of each loss of loss_type; empty: 1 each."""

    label_smoothing: float = setting(
        0.0,
        range=Range(0, 0.5, high_open=True),
        used_by=when(".loss_type", test=lambda losses: "robust" in losses, needs="robust in {section}.loss_type"),
    )
    """Probability that a pair is the wrong way round, for loss_type robust."""

    reference_free: bool = False
    """Compare answers by the policy alone, as if all were equally probable under the reference, of which there is none then."""
