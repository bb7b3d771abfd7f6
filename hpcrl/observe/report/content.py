"""Builds the content of a run's report, as JSON values, from the run's files alone, during the run or after its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import tomli

from hpcrl.config import Config
from hpcrl.config.difference import flat, value_as_toml
from hpcrl.config.secrets import masked
from hpcrl.data.rollouts import Decode
from hpcrl.errors import ConfigError, HpcrlError, RunError
from hpcrl.observe.advice import advise
from hpcrl.observe.charts import charts_of
from hpcrl.observe.evaluations import success_reward_of
from hpcrl.observe.goodput import account_of, node_time
from hpcrl.observe.node_seconds import CATEGORIES
from hpcrl.observe.report.about import about, cards
from hpcrl.observe.report.curves import curves_of
from hpcrl.observe.report.groups import groups_of
from hpcrl.observe.report.samples import samples_of
from hpcrl.observe.report.spans import timeline_of
from hpcrl.observe.report.verdict import Verdict, findings
from hpcrl.observe.summary import summarise
from hpcrl.observe.summary_table import summary_rows
from hpcrl.observe.timeline import versions_of
from hpcrl.rundir.alerts import read_alerts
from hpcrl.rundir.commit import checksum, read_bytes
from hpcrl.rundir.layout import COMMIT, Run
from hpcrl.rundir.ledger import Attempt, Outcome, read_attempts, read_outcomes
from hpcrl.rundir.records import read_object
from hpcrl.rundir.starts import read_starts, resumed_after

_VERSION = re.compile(r'^__version__ = "(.*)"', re.MULTILINE)
_ORDER = "bad", "look", "good"
Decoder = Callable[[Run], Decode]


def content_of(run: Run, decoder: Decoder, *, with_samples: bool = True) -> dict[str, Any]:
    """Return the content of a run's report.

    Args:
        decoder: returns what decodes the run's tokens; RunError where this machine cannot: samples are then shown as numbers.
    """
    attempts, outcomes = read_attempts(run), {outcome.attempt: outcome for outcome in read_outcomes(run)}
    started = attempts[0].started if attempts else 0.0
    config, code = _config(run), _code(run)
    curves = curves_of(run, started)
    ended = [outcomes[attempt.number] for attempt in attempts if attempt.number in outcomes]
    found = [*_alerts(run), *findings(curves, config.values, ended), *_waits(run)]
    summary = summarise(run)
    return {
        "name": f"{run.project}/{run.name}",
        "path": str(run.path),
        "made": time.time(),
        "started": started,
        "about": about(config.values, attempts, code),
        "cards": [asdict(card) for card in cards(summary, curves["metrics"], found)],
        "summary": summary_rows(summary),
        "findings": [asdict(one) for one in sorted(found, key=lambda one: _ORDER.index(one.status))],
        "goodput": _goodput(run),
        "attempts": _attempts(run, attempts, outcomes, started),
        "curves": curves,
        "charts": [
            (chart.category, chart.title, names)
            for chart, names in charts_of(curves["metrics"], success_reward_of(run))
        ],
        "groups": groups_of(run),
        "timeline": timeline_of(run, started),
        "samples": _samples(run, decoder) if with_samples else None,
        "config": config.settings,
        "environment": _environment(run, attempts, code),
    }


def _alerts(run: Run) -> list[Verdict]:
    return [
        Verdict(
            "alert" if alert.raised else "metric",
            "bad" if alert.raised and alert.cleared is None else "look",
            str(alert),
        )
        for alert in read_alerts(run)
    ]


def _waits(run: Run) -> list[Verdict]:
    with suppress(ConfigError):  # written by another hpcrl
        advised = advise(run)
        return [Verdict("waiting", "look", line) for line in advised.lines()] if advised else []
    return []


def _goodput(run: Run) -> dict[str, Any] | None:
    account = account_of(run)
    if account is None:
        return None
    uses = [(name, account.share(name), account.parts(name)) for name in CATEGORIES if account.share(name)]
    return {"total": account.goodput, "node_time": node_time(account.total), "queued": account.queued, "uses": uses}


def _attempts(run: Run, attempts: list[Attempt], outcomes: dict[int, Outcome], started: float) -> list[dict[str, Any]]:
    resumed = resumed_after(read_starts(run))
    return [
        {
            "number": attempt.number,
            "hosts": attempt.hosts,
            "job": attempt.job,
            "start": round(attempt.started - started, 1),
            "end": round(outcome.ended - started, 1) if outcome else None,
            "kind": outcome.kind if outcome else "running",
            "message": outcome.message if outcome else "",
            "after": resumed.get(attempt.number),
            "step": outcome.step if outcome else None,
        }
        for attempt in attempts
        for outcome in [outcomes.get(attempt.number)]
    ]


@dataclass(frozen=True)
class _Settings:
    """The configuration of a run.

    Attributes:
        values: by dotted path.
        settings: of each path the value as TOML, and whether it is not the default.
    """

    values: dict[str, Any]
    settings: list[tuple[str, str, bool]]


def _config(run: Run) -> _Settings:
    try:
        values = dict(flat(masked(tomli.loads(run.config.read_text(encoding="utf-8")))))
    except (tomli.TOMLDecodeError, ValueError) as error:
        raise RunError(f"{run.config} is damaged: {error}. Restore it from a backup") from error
    changed = set[str]()
    with suppress(ConfigError):  # written by an earlier hpcrl: which defaults it had is not known
        changed = {path for path, _ in flat(Config.from_toml([run.config]).changed())}
    settings = [(path, value_as_toml(value), path in changed) for path, value in values.items()]
    return _Settings(values, settings)


def _override(given: object) -> str:
    path, equals, value = str(given).partition("=")
    try:
        parsed = tomli.loads(f"value = {value}")["value"]
    except tomli.TOMLDecodeError:  # a text without quotes
        return f"{path}{equals}{masked(value)}"
    hidden = masked(parsed)
    return f"{path}{equals}{masked(value) if hidden == parsed else value_as_toml(hidden)}"


def _samples(run: Run, decoder: Decoder) -> dict[str, Any]:
    try:
        return {"note": "", **samples_of(run, decoder(run))}
    except HpcrlError as error:
        return {"note": str(error), **samples_of(run, None)}


def _code(run: Run) -> str:
    """Return the version of the code that the run executes."""
    file, commit = run.code / "hpcrl" / "__init__.py", read_bytes(run.code / COMMIT)
    found = _VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    number, _, changes = (commit or b"").decode(errors="replace").strip().partition(" ")
    made_from = f", commit {number[:12]} {changes}".rstrip() if number else ""
    return f"hpcrl {found[1]}{made_from}" if found else "not known"


def _environment(run: Run, attempts: list[Attempt], code: str) -> list[tuple[str, str]]:
    submission = read_object(run.submission, "remove it: the job of the run is then not known") or {}
    rows = [
        ("directory", str(run.path)),
        ("code", code),
        ("checksum of configuration and code", checksum(run.checksums) if run.checksums.is_file() else "none"),
        ("executor", f"{submission.get('executor', 'not known')}, job {submission.get('job_id', 'not known')}"),
        ("overrides", " ".join(map(_override, submission.get("overrides") or [])) or "none"),
        ("hosts", ", ".join(dict.fromkeys(host for attempt in attempts for host in attempt.hosts)) or "none yet"),
    ]
    return rows + [(name, version) for name, version in versions_of(run).items()]
