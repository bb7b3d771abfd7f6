"""Judges metrics by alert rules: pure functions of values, in the order of their steps."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean

from hpcrl.config.sections.alerts import METRIC_OF, AlertRuleConfig


def metric_of(rule: AlertRuleConfig) -> str | None:
    """Return the metric that a rule looks at; None for no_progress."""
    return rule.metric or METRIC_OF.get(rule.kind, (None, None))[1]


class AlertJudge:
    """Judges the values of one rule's metric, one after the other. A value that is not finite is beyond every limit."""

    def __init__(self, rule: AlertRuleConfig) -> None:
        assert rule.value is not None
        self._rule, self._metric = rule, metric_of(rule)
        self._asks = METRIC_OF.get(rule.kind, (rule.kind, ""))[0]
        self._limit = 1 - rule.value if rule.kind == "truncated_above" else rule.value
        self._recent, self._best = deque[float](maxlen=2 * rule.window), -math.inf
        self._beyond = 0

    def take(self, value: float) -> str:
        """Return the finding once as many values in a row as the rule requires are beyond its limit; else nothing."""
        found = self._found(value)
        self._beyond = self._beyond + 1 if found else 0
        if self._beyond < self._rule.steps:
            return ""
        return found + (f", {self._beyond} times in a row" if self._rule.steps > 1 else "")

    def _found(self, value: float) -> str:
        if not math.isfinite(value):
            return f"{self._metric} is {value}"
        if self._asks == "fell":
            return self._fell(value)
        beyond = value > self._limit if self._asks == "above" else value < self._limit
        return f"{self._metric} is {value:.4g}, {self._asks} {self._limit:.4g}" if beyond else ""

    def _fell(self, value: float) -> str:
        window = self._rule.window
        self._recent.append(value)
        values = list(self._recent)
        if len(values) < window:
            return ""
        mean, before = fmean(values[-window:]), self._before(values[:-window])
        self._best = max(self._best, mean)
        if before - mean <= self._limit:
            return ""
        of = f" on average of {window}" if window > 1 else ""
        then = "at best" if self._rule.since == "best" else "before"
        return f"{self._metric} is {mean:.4g}{of}, and was {before:.4g} {then}: it fell by more than {self._limit:.4g}"

    def _before(self, earlier: list[float]) -> float:
        if self._rule.since == "best":
            return self._best
        return fmean(earlier) if len(earlier) == self._rule.window else -math.inf
