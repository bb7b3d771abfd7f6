"""Section `trainer.dpo`: losses of pairs of a chosen and a rejected answer, and of single answers with a label. Names: TRL's."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.setting import NOT_NEGATIVE, POSITIVE, Range, setting, when

PREFERENCE_LOSSES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "bco_pair", "nca_pair", "apo_zero", "apo_down"),
    *("simpo", "orpo"),
    *("sft", "kto", "apo_zero_unpaired"),
)
"""Losses by their names; docs/learning_from_datasets.md has their formulas."""

UNPAIRED_LOSSES = ("kto", "apo_zero_unpaired")
"""Losses of single answers, each desirable or undesirable."""

UNPAIRED = when(
    "trainer.dpo.loss_type",
    test=lambda losses: not set(UNPAIRED_LOSSES).isdisjoint(losses),
    needs="kto or apo_zero_unpaired in trainer.dpo.loss_type",
)

_WITHOUT_REFERENCE = {"simpo", "orpo"}


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    beta: float = setting(0.1, range=POSITIVE)
    """How closely the policy keeps to the reference: rewards are beta times the log-ratio of policy and reference. With loss_type ipo the τ of its paper."""

    loss_type: list[str] = setting(["sigmoid"])
    """Losses that are added up. sigmoid, sigmoid_norm, hinge, ipo, robust, bco_pair, nca_pair, apo_zero, apo_down, simpo and orpo are means over pairs. The last two compare with no reference, which is not loaded for them alone. sft is the cross entropy of the chosen answers, a mean over their tokens. kto and apo_zero_unpaired are means over single answers, and stand alone."""

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

    desirable_weight: float = setting(1.0, range=POSITIVE, used_by=UNPAIRED)
    """Weight of desirable answers, for loss_type kto and apo_zero_unpaired. Where there are fewer of them than of the others, raise it until their weights add up to 1 to 1.33 times those of the others (arXiv:2402.01306)."""

    undesirable_weight: float = setting(1.0, range=POSITIVE, used_by=UNPAIRED)
    """Weight of undesirable answers, for loss_type kto and apo_zero_unpaired."""

    reference_free: bool = False
    """Compare answers by the policy alone, as if all were equally probable under the reference, of which there is none then."""

    @property
    def compares_tokens(self) -> bool:
        """Whether answers are compared by the mean log-probability of their tokens alone: no loss but the likelihood has a reference."""
        compared = set(self.loss_type) - {"sft"}
        return bool(compared) and compared <= _WITHOUT_REFERENCE

    @property
    def unpaired(self) -> bool:
        """Whether single answers with a label are trained, not pairs."""
        return not set(UNPAIRED_LOSSES).isdisjoint(self.loss_type)

    @property
    def uses_reference(self) -> bool:
        """Whether there is a reference model."""
        return not (self.reference_free or self.compares_tokens)
