"""Section `trainer.dpo`: losses of pairs of a chosen and a rejected answer. Names: TRL's."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.setting import NOT_NEGATIVE, POSITIVE, Range, setting, when

PREFERENCE_LOSSES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "bco_pair", "nca_pair", "apo_zero", "apo_down"),
    *("simpo", "orpo"),
    "sft",
)
"""Losses by their names; docs/learning_from_datasets.md has their formulas."""

_WITHOUT_REFERENCE = {"simpo", "orpo"}


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    beta: float = setting(0.1, range=POSITIVE)
    """How closely the policy keeps to the reference: rewards are beta times the log-ratio of policy and reference. With loss_type ipo the τ of its paper."""

    loss_type: list[str] = setting(["sigmoid"])
    """Losses that are added up. sigmoid, sigmoid_norm, hinge, ipo, robust, bco_pair, nca_pair, apo_zero, apo_down, simpo and orpo are means over pairs. The last two compare with no reference, which is not loaded for them alone. sft is the cross entropy of the chosen answers, a mean over their tokens."""

    loss_weights: list[float] = setting([])
    """Weight of each loss of loss_type; empty: 1 each."""

    label_smoothing: float = setting(
        0.0,
        range=Range(0, 0.5, high_open=True),
        used_by=when(".loss_type", test=lambda losses: "robust" in losses, needs="robust in {section}.loss_type"),
    )
    """Probability that a pair is the wrong way round, for loss_type robust."""

    simpo_gamma: float = setting(
        0.5,
        range=NOT_NEGATIVE,
        used_by=when(".loss_type", test=lambda losses: "simpo" in losses, needs="simpo in {section}.loss_type"),
    )
    """Margin by which the chosen answer's reward should exceed that of the rejected one, for loss_type simpo (arXiv:2405.14734). Its authors use 0.3 to 1.6 with a beta of 2 to 2.5."""

    reference_free: bool = False
    """Compare answers by the policy alone, as if all were equally probable under the reference, of which there is none then."""

    @property
    def compares_tokens(self) -> bool:
        """Whether answers are compared by the mean log-probability of their tokens alone: no loss but the likelihood has a reference."""
        compared = set(self.loss_type) - {"sft"}
        return bool(compared) and compared <= _WITHOUT_REFERENCE

    @property
    def uses_reference(self) -> bool:
        """Whether there is a reference model."""
        return not (self.reference_free or self.compares_tokens)
