"""Combinations in rules of alerts."""

from __future__ import annotations

from typing import Any

from tests.config.rules.skyrl_cases import NO_KL, SFT, Case

ALERTS = "trainer.alerts"
_RULE = f"{ALERTS}.rules.one"


def rule(**settings: Any) -> dict[str, Any]:
    return {f"{_RULE}.{name}": value for name, value in settings.items()}


ENTROPY = rule(kind="entropy_below", value=0.1)

OF_ALERTS = [
    Case(
        "an alert has a name that a file can have",
        {f"{ALERTS}.rules.one two.kind": "no_progress", f"{ALERTS}.rules.one two.minutes": 3.0},
        f"{ALERTS}.rules.one two", "expected a name of letters",
        rule(kind="no_progress", minutes=3.0),
    ),
    Case("no progress for how long", rule(kind="no_progress"), f"{_RULE}.minutes", "required", rule(kind="no_progress", minutes=30)),
    Case("a limit is a number of a metric, not of minutes", {**ENTROPY, **rule(minutes=3)}, f"{_RULE}.minutes", "found 3", ENTROPY),
    Case("a limit is there", rule(kind="kl_above"), f"{_RULE}.value", "required", rule(kind="kl_above", value=0.5)),
    Case(
        "a fall is not negative",
        rule(kind="reward_fell", value=-0.1), f"{_RULE}.value", "at least 0 where something fell",
        rule(kind="reward_fell", value=0.1, window=5, since="before", steps=2),
    ),
    Case("steps in a row", {**ENTROPY, **rule(steps=0)}, f"{_RULE}.steps", "found 0", {**ENTROPY, **rule(steps=3)}),
    Case("only a fall has a window", {**ENTROPY, **rule(window=4)}, f"{_RULE}.window", 'not for kind="entropy_below"', ENTROPY),
    Case("a metric is named", rule(kind="below", value=1), f"{_RULE}.metric", "required", rule(kind="below", value=1, metric="policy/lr")),
    Case("a kind has its metric", {**ENTROPY, **rule(metric="x")}, f"{_RULE}.metric", "has its own", ENTROPY),
    Case(
        "scores that are never measured do not fall",
        {**rule(kind="score_fell", value=0.1), "trainer.eval_interval": 0}, _RULE, "nothing is evaluated",
        {**rule(kind="reward_fell", value=0.1), "trainer.eval_interval": 0},
    ),
    Case(
        "what is only given has no rewards",
        {**SFT, **rule(kind="reward_fell", value=0.1)}, f"{_RULE}.kind", 'there is no reward/avg_raw_reward with trainer.mode="sft"',
        {**SFT, **rule(kind="above", value=5, metric="policy/grad_norm", steps=3)},
    ),
    Case("no divergence without a reference", {**NO_KL, **rule(kind="kl_above", value=1)}, f"{_RULE}.kind", "use_kl_loss", {**NO_KL, **ENTROPY}),
    Case(
        "a webhook is an address",
        {**ENTROPY, f"{ALERTS}.webhook": "hooks.example/x"}, f"{ALERTS}.webhook", "begins with https://",
        {**ENTROPY, f"{ALERTS}.webhook": "https://hooks.example/x"},
    ),
    Case(
        "one webhook",
        {**ENTROPY, f"{ALERTS}.webhook": "https://a", f"{ALERTS}.webhook_file": "f"}, f"{ALERTS}.webhook_file", "leave one of them out",
        {**ENTROPY, f"{ALERTS}.webhook_file": "f"},
    ),
    Case("alerts have rules", {f"{ALERTS}.command": ["true"]}, f"{ALERTS}.command", "no effect without trainer.alerts.rules", {**ENTROPY, f"{ALERTS}.command": ["true"]}),
]  # fmt: skip
