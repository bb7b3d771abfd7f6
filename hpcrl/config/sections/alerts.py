"""Section `trainer.alerts`: alerts of a run, and where they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.fields import Location
from hpcrl.config.setting import any_of, setting, when

Metric = Literal["above", "below", "fell"]
"""What a rule may ask of a metric that it names."""

METRIC_OF: dict[str, tuple[Metric, str]] = {
    "reward_fell": ("fell", "reward/avg_raw_reward"),
    "score_fell": ("fell", "eval/all/avg_score"),
    "kl_above": ("above", "policy/policy_kl"),
    "entropy_below": ("below", "policy/policy_entropy"),
    "mismatch_above": ("above", "policy/logprob_mismatch"),
    "truncated_above": ("below", "generate/stop_ratio"),
}
"""What the other kinds ask, and of which metric; no_progress asks of none."""


@dataclass(frozen=True, kw_only=True)
class AlertRuleConfig:
    kind: Literal[
        "above", "below", "fell",
        "reward_fell", "score_fell", "kl_above", "entropy_below", "mismatch_above", "truncated_above", "no_progress",
    ]  # fmt: skip
    """What raises the alert: a metric above or below value, a fall of a metric by more than value, or a run without progress. Some kinds name their metric: reward, evaluation score, divergence from the reference, entropy, difference between engines and trainer, or share of samples that are cut off."""

    metric: str | None = None
    """Name of the metric of above, below and fell, as in metrics/ and TensorBoard."""

    value: float | None = None
    """The limit; of fell the loss, in the metric's own unit, that is one too many."""

    steps: int = 1
    """Values in a row that have to be beyond the limit; of an evaluation these are evaluations."""

    window: int = 1
    """Values over whose mean fell compares."""

    since: Literal["best", "before"] = "best"
    """With what fell compares: the best mean so far, or that of as many values right before."""

    minutes: float | None = None
    """Of no_progress: time without a step that is trained or an evaluation that ends."""

    stop: bool = False
    """Save and stop the run, as `hpcrl cancel` does."""


@dataclass(frozen=True, kw_only=True)
class AlertsConfig:
    rules: dict[str, AlertRuleConfig] = setting({})
    """What to look out for, by names of your own: tables [trainer.alerts.rules.NAME]."""

    command: list[Location] = setting([], used_by=any_of(when(".rules"), when("trainer.ckpt_keep_best")))
    """Program and arguments that are run for each alert, with what it is about in environment variables; no shell. Empty: none."""

    webhook: str | None = setting(None, used_by=any_of(when(".rules"), when("trainer.ckpt_keep_best")))
    """Address to which each alert is sent as JSON. It is in config.toml, reports and trackers: one that is a secret belongs in webhook_file."""

    webhook_file: Location | None = setting(None, used_by=any_of(when(".rules"), when("trainer.ckpt_keep_best")))
    """File, readable where the controller runs, that holds such an address."""
