"""Rules about alerts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from hpcrl.config.errors import Problem
from hpcrl.config.sections.alerts import METRIC_OF, AlertRuleConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree

_ALERTS = "trainer.alerts"
_NAME = re.compile(r"[\w-]{1,60}", re.ASCII)


def alerts(config: ConfigTree) -> Iterator[Problem]:
    section = config.trainer.alerts
    for name, rule in section.rules.items():
        path = f"{_ALERTS}.rules.{name}"
        if not _NAME.fullmatch(name):
            yield Problem(path, "expected a name of letters, digits, _ and -, at most 60")
        yield from _numbers(path, rule)
        yield from _metric(path, rule, config.trainer)
    if section.webhook is not None and not section.webhook.startswith(("https://", "http://")):
        yield Problem(f"{_ALERTS}.webhook", "expected an address that begins with https:// or http://")
    if section.webhook is not None and section.webhook_file is not None:
        yield Problem(f"{_ALERTS}.webhook_file", "trainer.alerts.webhook is an address already; leave one of them out")


def _numbers(path: str, rule: AlertRuleConfig) -> Iterator[Problem]:
    idle = rule.kind == "no_progress"
    fell = rule.kind == "fell" or METRIC_OF.get(rule.kind, ("", ""))[0] == "fell"
    if rule.minutes is None and idle:
        yield Problem(f"{path}.minutes", f'required with kind="{rule.kind}"')
    if rule.minutes is not None and not (idle and 0 < rule.minutes < math.inf):
        yield Problem(
            f"{path}.minutes",
            f'expected a number above 0 with kind="no_progress", and none with others; found {rule.minutes:g}',
        )
    if rule.value is None and not idle:
        yield Problem(f"{path}.value", f'required with kind="{rule.kind}"')
    if rule.value is not None and (idle or not math.isfinite(rule.value) or (fell and rule.value < 0)):
        yield Problem(
            f"{path}.value",
            f'expected a finite number, at least 0 where something fell, and none with kind="no_progress"; found {rule.value:g}',
        )
    if rule.steps < 1 or (idle and rule.steps > 1):
        yield Problem(f"{path}.steps", f'expected at least 1, and no more with kind="no_progress"; found {rule.steps}')
    if rule.window < 1 or (not fell and (rule.window > 1 or rule.since != "best")):
        yield Problem(
            f"{path}.window",
            f'window (at least 1) and since are for what fell, not for kind="{rule.kind}"; found {rule.window}',
        )


def _metric(path: str, rule: AlertRuleConfig, trainer: TrainerConfig) -> Iterator[Problem]:
    own = rule.kind in ("above", "below", "fell")
    if own and not rule.metric:
        yield Problem(f"{path}.metric", f'required with kind="{rule.kind}": a name as in TensorBoard')
    if not own and rule.metric is not None:
        yield Problem(f"{path}.metric", f'kind="{rule.kind}" has its own; choose above, below or fell, or leave it out')
    asked = rule.metric if own else METRIC_OF.get(rule.kind, ("", ""))[1]
    if asked and asked.startswith("eval/") and trainer.eval_interval <= 0:
        yield Problem(path, "nothing is evaluated with trainer.eval_interval=0; set that, or leave the rule out")
    elif not own and asked and trainer.offline and not asked.startswith("eval/"):
        yield Problem(
            f"{path}.kind",
            f'there is no {asked} with trainer.mode="{trainer.mode}"; choose above, below or fell, and a metric',
        )
    elif rule.kind == "wait_above" and trainer.placement.colocate_all:
        yield Problem(
            f"{path}.kind",
            "with trainer.placement.colocate_all the engines have the GPUs while the trainer waits; leave the rule out",
        )
    elif rule.kind == "kl_above" and not trainer.algorithm.use_kl_loss:
        yield Problem(
            f"{path}.kind", "the divergence from the reference is not computed without trainer.algorithm.use_kl_loss"
        )
