"""Rules on series of values."""

from __future__ import annotations

import math

import pytest

from hpcrl.config.sections.alerts import AlertRuleConfig
from hpcrl.observe.alerts.rules import AlertJudge


def judged(rule: AlertRuleConfig, *values: float) -> str:
    """Return a letter per value: ! where the rule finds something."""
    judge = AlertJudge(rule)
    return "".join("!" if judge.take(value) else "." for value in values)


@pytest.mark.parametrize(
    ("rule", "values", "found"),
    [
        (AlertRuleConfig(kind="kl_above", value=1), (0.5, 1, 1.1, 0.9, 2), "..!.!"),
        (AlertRuleConfig(kind="entropy_below", value=0.1, steps=3), (0.05, 0.05, 0.2, 0.05, 0.05, 0.05, 0.04), ".....!!"),
        (AlertRuleConfig(kind="truncated_above", value=0.25), (1.0, 0.75, 0.7, 0.8), "..!."),
        (AlertRuleConfig(kind="above", metric="x", value=-2), (-3, -1), ".!"),
        (AlertRuleConfig(kind="mismatch_above", value=9, steps=2), (math.nan, math.inf, 0), ".!."),
        (AlertRuleConfig(kind="reward_fell", value=0.2), (0.1, 0.9, 0.75, 0.6, 0.8, 0.95, 0.74), "...!..!"),
        (AlertRuleConfig(kind="reward_fell", value=0.5), (-2.0, -2.6), ".!"),
        # means of two: 0, 0.5, 0.5, 0, 0.5
        (AlertRuleConfig(kind="score_fell", value=0.3, window=2), (0, 0, 1, 0, 0, 1), "....!."),
        # means of two against the two before: (1, 1) -> (0, 0), (1, 0) -> (0, 0), (0, 0) -> (0, 0)
        (AlertRuleConfig(kind="fell", metric="x", value=0.6, window=2, since="before"), (1, 1, 0, 0, 0, 0), "...!.."),
    ],
    ids=lambda value: value.kind if isinstance(value, AlertRuleConfig) else "",
)  # fmt: skip
def test_rules(rule: AlertRuleConfig, values: tuple[float, ...], found: str) -> None:
    assert judged(rule, *values) == found


def test_what_is_found_is_told_with_its_numbers() -> None:
    judge = AlertJudge(AlertRuleConfig(kind="kl_above", value=0.1, steps=2))
    assert [judge.take(value) for value in (0.2, 0.3125)] == [
        "",
        "policy/policy_kl is 0.3125, above 0.1, 2 times in a row",
    ]
    judge = AlertJudge(AlertRuleConfig(kind="reward_fell", value=0.1, window=2))
    texts = [judge.take(value) for value in (0.5, 0.5, 0.25)]
    assert texts[2] == "reward/avg_raw_reward is 0.375 on average of 2, and was 0.5 at best: it fell by more than 0.1"
