"""Section `trainer.alerts`: alerts of a run, and where they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.conditions import RL
from hpcrl.config.fields import Location
from hpcrl.config.setting import NOT_NEGATIVE, any_of, setting, when

Metric = Literal["above", "below", "fell"]
"""What a rule may ask of a metric that it names."""

METRIC_OF: dict[str, tuple[Metric, str]] = {
    "reward_fell": ("fell", "reward/avg_raw_reward"),
    "score_fell": ("fell", "eval/all/avg_score"),
    "kl_above": ("above", "policy/policy_kl"),
    "entropy_below": ("below", "policy/policy_entropy"),
    "mismatch_above": ("above", "policy/logprob_mismatch"),
    "truncated_above": ("below", "generate/stop_ratio"),
    "no_spread_above": ("above", "reward/groups_without_spread"),
    "wait_above": ("above", "throughput/wait_share"),
}
"""What the other kinds ask, and of which metric; no_progress asks of none."""


@dataclass(frozen=True, kw_only=True)
class AlertRuleConfig:
    kind: Literal[
        "above", "below", "fell",
        "reward_fell", "score_fell", "kl_above", "entropy_below", "mismatch_above", "truncated_above", "no_spread_above",
        "wait_above", "no_progress",
    ]  # fmt: skip
    """What raises the alert: a metric above or below value, a fall of a metric by more than value, or a run without progress. Some kinds name their metric: reward, evaluation score, divergence from the reference, entropy, difference between engines and trainer, share of samples that are cut off. no_spread_above is about the share of groups whose samples all have the same reward; wait_above is about the share of a step in which the trainer waits for its batch."""

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


_ALERTS = any_of(when(".rules"), when(".steps_without_signal"), when("trainer.ckpt_keep_best"))


@dataclass(frozen=True, kw_only=True)
class AlertsConfig:
    rules: dict[str, AlertRuleConfig] = setting({})
    """What to look out for, by names of your own: tables [trainer.alerts.rules.NAME]."""

    steps_without_signal: int = setting(3, range=NOT_NEGATIVE, used_by=RL)
    """Steps in a row after which the alert learning is raised: more than 99 % of their groups have one reward for all their samples. It ends no run. 0: never. A run with a teacher (trainer.distillation.enable) has no such alert: its rewards may all be alike."""

    command: list[Location] = setting([], used_by=_ALERTS)
    """Program and arguments that are run for each alert, with what it is about in environment variables; no shell. Empty: none."""

    webhook: str | None = setting(None, used_by=_ALERTS)
    """Address to which each alert is sent as JSON. It is in config.toml, reports and trackers: one that is a secret belongs in webhook_file."""

    webhook_file: Location | None = setting(None, used_by=_ALERTS)
    """File, readable where the controller runs, that holds such an address."""
