"""Alerts of a run: alerts.jsonl, one line per event, each with a checksum.

    {"alert": "kl", "event": "raised", "step": 12, "attempt": 1, "time": 1763666666.5, "text": "policy/policy_kl is 0.31, above 0.1", "blake2b": …}

`raised`: the rule's condition has begun; no further event follows before it is over. `told`: command and webhook received it, or never will.
`cleared`: the condition is over. `missing`: no process reports the rule's metric.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from hpcrl.errors import RunError
from hpcrl.rundir.checked_lines import append_lines, read_lines
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import require_newest
from hpcrl.rundir.records import as_record

Event = Literal["raised", "told", "cleared", "missing"]


@dataclass(frozen=True)
class AlertEvent:
    """One line.

    Attributes:
        alert: name of the rule.
        step: of the value that was looked at; of a run that makes no progress the last one that was trained.
        time: Unix time.
        text: what was found.
    """

    alert: str
    event: Event
    step: int
    attempt: int
    time: float
    text: str


@dataclass(frozen=True)
class Alert:
    """An alert, or a rule whose metric is missing.

    Attributes:
        begin: how it began: raised, or missing.
        cleared: step from which it is over; None while it lasts.
    """

    begin: AlertEvent
    notified: bool = False
    cleared: int | None = None

    @property
    def name(self) -> str:
        return self.begin.alert

    @property
    def raised(self) -> bool:
        return self.begin.event == "raised"

    def __str__(self) -> str:
        over = "" if self.cleared is None else f"; over at step {self.cleared}"
        return f"{self.name} at step {self.begin.step}: {self.begin.text}{over}"


def append_event(run: Run, event: AlertEvent) -> None:
    """Write an event down; the process that watches the run's newest attempt is the only one to do so."""
    require_newest(run, event.attempt)
    append_lines(run.alerts, [asdict(event)])


def read_alerts(run: Run) -> list[Alert]:
    """Return the alerts of a run, oldest first. A line that is damaged is left out: `hpcrl verify` tells it."""
    events = []
    for line in read_lines(run.alerts):
        with suppress(RunError):
            events.append(as_record(AlertEvent, line, run.alerts, ""))
    return _alerts(events)


def _alerts(events: Iterable[AlertEvent]) -> list[Alert]:
    alerts, newest = list[Alert](), dict[str, int]()
    for event in events:
        at = newest.get(event.alert)
        if event.event in ("raised", "missing"):
            newest[event.alert] = len(alerts)
            alerts.append(Alert(event))
        elif at is not None:
            known = alerts[at]
            notified = known.notified or event.event == "told"
            alerts[at] = Alert(known.begin, notified, event.step if event.event == "cleared" else known.cleared)
    return alerts
