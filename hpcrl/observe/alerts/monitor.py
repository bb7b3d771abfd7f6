"""Reads a run's metrics and raises its alerts: python -m hpcrl.observe.alerts.monitor RUN ATTEMPT

It ends with its standard input. It is a process of its own, so that it sees a run that hangs, and cannot block one.

Each attempt judges all valid values again, those of earlier attempts too, and events begin after the newest step of the rule in
alerts.jsonl. So an event between two attempts is raised late, and one that lasts over a restart is not raised twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from hpcrl.config import Config
from hpcrl.config.sections.alerts import AlertRuleConfig, AlertsConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.errors import HpcrlError, did_you_mean
from hpcrl.observe.advice import advise
from hpcrl.observe.alerts.notify import call_webhook, run_command, webhook_of
from hpcrl.observe.alerts.rules import AlertJudge, metric_of
from hpcrl.observe.metrics import MetricsReader, Record, last_reports
from hpcrl.observe.summary import EVAL_FAILED, EVAL_LOSS, EVAL_SCORE, STEP_SECONDS
from hpcrl.rundir.alerts import Alert, AlertEvent, Event, append_event, read_alerts
from hpcrl.rundir.layout import Run
from hpcrl.runtime.followers import more
from hpcrl.runtime.heartbeat import SuspendAwareClock
from hpcrl.runtime.signals import ask_to_stop

_MODULE = "hpcrl.observe.alerts.monitor"
_EVALUATED = (EVAL_SCORE, EVAL_LOSS, EVAL_FAILED)  # one of them is in every evaluation
_PROGRESS = (STEP_SECONDS, *_EVALUATED)
LEARNING = "learning"
"""Name of the default rule; a rule of the configuration with this name replaces it."""
_KEEP_BEST = "trainer.ckpt_keep_best"  # no name of a rule
_LONGEST_PAUSE_S = 60.0  # command and webhook are awaited between two polls


class AlertMonitor:
    """Judges the metrics of one attempt by the alert rules, and finds settings that name a metric which no process reports."""

    def __init__(self, run: Run, attempt: int, trainer: TrainerConfig) -> None:
        self._run, self._attempt, self._config = run, attempt, trainer.alerts
        self._best, self._rules = trainer.ckpt_keep_best, rules_of(trainer.alerts, rewarded=trainer.learns_from_rewards)
        self._clock = SuspendAwareClock(_LONGEST_PAUSE_S)
        self._step, self._progressed = 0, self._clock.now()
        self._newest = {alert.name: alert for alert in read_alerts(run)}
        self.begin()

    def begin(self) -> None:
        """Judge from the first step on, and notify of earlier events that a kill or the filesystem left without a notification."""
        rules = {name: metric for name, rule in self._rules.items() if (metric := metric_of(rule))}
        self._judges = {name: AlertJudge(self._rules[name]) for name in rules}
        self._metrics = rules | ({_KEEP_BEST: self._best} if self._best else {})
        for alert in self._newest.values():
            if not alert.notified and (alert.raised or alert.cleared is None):
                self._notify(alert)
        self._reader, self._reported = MetricsReader(self._run, *_PROGRESS, *self._metrics.values()), set[str]()
        self._seen = dict[str, int]()
        self._checked = set(self._rules) - set(self._config.rules)  # groups of one sample have no spread to report

    def poll(self) -> None:
        """Judge the metrics since the last call."""
        records, outdated = self._reader.poll()
        if outdated:
            self.begin()
            records, _ = self._reader.poll()
        self._check_metric_names()
        ordered = list(last_reports(records))
        self._check_progress(ordered)
        for record in ordered:
            self._reported |= record.metrics.keys()
            for name, metric in self._metrics.items():
                if metric in record.metrics and record.step > self._seen.get(name, -1):
                    self._seen[name] = record.step
                    judge = self._judges.get(name)
                    self._judge(name, record.step, judge.take(record.metrics[metric]) if judge else "")

    def _judge(self, name: str, step: int, found: str) -> None:
        newest = self._newest.get(name)
        if newest and not newest.raised and newest.cleared is None:
            self._write(name, "cleared", step, "")  # its metric has come after all
        last = max(newest.begin.step, newest.cleared or 0) if newest and newest.raised else -1
        if step <= last:
            return
        lasts = self._lasts(name)
        if found and not lasts:
            self._raise(name, step, found)
        elif lasts and not found:
            self._write(name, "cleared", step, "")

    def _lasts(self, name: str) -> bool:
        newest = self._newest.get(name)
        return newest is not None and newest.raised and newest.cleared is None

    def _check_progress(self, records: Iterable[Record]) -> None:
        """Raise no_progress; steps of earlier attempts are no progress."""
        now = self._clock.now()
        for record in records:
            if not record.metrics.keys().isdisjoint(_PROGRESS):
                self._step = max(self._step, record.step)  # scores of a version come after later steps
                if record.attempt == self._attempt:
                    self._progressed = now
        for name, rule in self._rules.items():
            if rule.minutes is None:
                continue
            idle = now - self._progressed
            if idle > 60 * rule.minutes and not self._lasts(name):
                self._raise(
                    name, self._step, f"no step was trained and no evaluation ended for {rule.minutes:g} minutes"
                )
            elif self._progressed == now and self._lasts(name):
                self._write(name, "cleared", self._step, "")

    def _check_metric_names(self) -> None:
        """Notify of rules and settings whose metric no process reports, after the records of a first step, or evaluation."""
        for name, metric in self._metrics.items():
            awaited = _EVALUATED if metric.startswith("eval/") else (STEP_SECONDS,)
            if name in self._checked or self._reported.isdisjoint(awaited):
                continue
            self._checked.add(name)
            if metric not in self._reported and name not in self._newest:
                known = {other for record in MetricsReader(self._run).poll()[0] for other in record.metrics}
                text = f"step {self._step} reported no metric {metric}{did_you_mean(metric, known, 3)}"
                self._notify(self._write(name, "missing", self._step, text))

    def _raise(self, name: str, step: int, text: str) -> None:
        if self._rules[name].kind == "wait_above" and (advised := advise(self._run)):
            text = "; ".join([text, *advised.lines()])
        self._notify(self._write(name, "raised", step, text))

    def _write(self, name: str, event: Event, step: int, text: str) -> Alert:
        written = AlertEvent(name, event, step, self._attempt, time.time(), text)
        append_event(self._run, written)
        print(f"{name}: {event} at step {step}{text and ': '}{text}", flush=True)
        known = self._newest.get(name)
        if event in ("raised", "missing"):
            alert = Alert(written)
        else:
            assert known
            alert = Alert(known.begin, True, step if event == "cleared" else known.cleared)
        self._newest[name] = alert
        return alert

    def _notify(self, alert: Alert) -> None:
        """Run the command, call the webhook and stop the run. After a kill in between, the next attempt does it again."""
        rule = self._rules.get(alert.name)
        facts = self._facts(alert, rule)
        if self._config.command:
            variables = {f"HPCRL_ALERT_{name.upper()}": str(value) for name, value in facts.items()}
            run_command(self._config.command, variables, self._run.path)
        if address := webhook_of(self._config.webhook, self._config.webhook_file):
            call_webhook(address, facts)
        if rule and rule.stop and alert.raised:
            ask_to_stop(self._run, self._attempt, "cancelled", f"alert {alert.name}: {alert.begin.text}")
        self._write(alert.name, "told", alert.begin.step, "")

    def _facts(self, alert: Alert, rule: AlertRuleConfig | None) -> dict[str, Any]:
        begin, run = alert.begin, self._run
        return {
            "text": f"{run.project}/{run.name}: {alert.name} at step {begin.step}: {begin.text}",
            "name": begin.alert,
            "kind": rule.kind if rule else "",
            "metric": self._metrics.get(begin.alert, ""),
            "found": begin.text,
            "step": begin.step,
            "time": begin.time,
            "attempt": begin.attempt,
            "project": run.project,
            "run": run.name,
            "path": str(run.path),
            "stops": bool(rule and rule.stop and alert.raised),
        }


def rules_of(alerts: AlertsConfig, *, rewarded: bool) -> dict[str, AlertRuleConfig]:
    """Return the rules of a run by name; where the policy learns from rewards alone, one of them is that these differ."""
    steps = alerts.steps_without_signal if rewarded else 0
    default = {LEARNING: AlertRuleConfig(kind="no_spread_above", value=0.99, steps=steps)} if steps else {}
    return {**default, **alerts.rules}


def monitor_process(run: Run, attempt: int, trainer: TrainerConfig) -> dict[str, list[str]]:
    """Return the command of the process that monitors a run, by name; empty where no setting names a metric."""
    watched = rules_of(trainer.alerts, rewarded=trainer.learns_from_rewards) or trainer.ckpt_keep_best
    return {"alerts": [_MODULE, str(run.path), str(attempt)]} if watched else {}


def main(path: str, attempt: int, again: Callable[[], bool]) -> None:
    """Poll until `again` returns False; errors of the filesystem are retried."""
    run = Run.open(path)
    alerts, goes_on, failed = AlertMonitor(run, attempt, Config.from_toml([run.config]).trainer), True, False
    while goes_on:
        goes_on = again()
        try:
            if failed:  # records of a failed read are lost
                alerts.begin()
            alerts.poll()
            failed = False
        except OSError as error:
            print(f"waiting for the filesystem: {error}", flush=True)
            failed = True


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), more)
    except HpcrlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
