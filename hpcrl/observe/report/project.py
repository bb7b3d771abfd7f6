"""Builds the page of a project: all its runs in one table, and the verdicts of its trials, from files alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tomli

import hpcrl
from hpcrl.config.difference import flat, value_as_toml
from hpcrl.config.secrets import masked
from hpcrl.errors import HpcrlError
from hpcrl.observe.goodput import account_of
from hpcrl.observe.report.curves import rounded
from hpcrl.observe.summary import headline
from hpcrl.observe.trial.plan import TrialFolder
from hpcrl.observe.trial.report import describe_trial
from hpcrl.rundir.allocations import SILENT_S
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts

_HOUR = 3600.0
_MOST_DIFFERENCES = 12
_LARGE = {
    *("samples", "scores", "teacher", "dataset", "turns", "snapshots", "pictures", "batches", "dumps", "weights", "checkpoints", "exports"),
    *("code", "control", "secrets", "tensorboard", "logs"),
}  # fmt: skip
"""Folders of a run that `last_change` does not look into."""
_OF_REPORTS = (".py", ".js", ".css", ".html")
_OF_EACH_RUN = ("trainer.run_name", "trainer.seed")
"""Settings in which runs of one recipe differ: the name is another column."""


def last_change(run: Run) -> int | None:
    """Return when a file that a report may show was last changed, or hpcrl itself, in nanoseconds since 1970.

    Tokens, weights and checkpoints are left out: what is shown of them is recorded beside them too.

    Returns:
        None where that is not `SILENT_S` ago: of a run that was killed a report shows something else then, though no file has changed.
    """
    newest, folders = 0, [str(run.path)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # it has just been removed, or is somebody else's
            for entry in entries:
                if entry.name in _LARGE:
                    continue
                with suppress(OSError):
                    newest = max(newest, entry.stat(follow_symlinks=False).st_mtime_ns)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return None if time.time_ns() - newest < SILENT_S * 1e9 else max(newest, _installed())


@cache
def _installed() -> int:
    """Return when the newest file of hpcrl came to its place, in nanoseconds since 1970; installers may keep the times of changes."""
    files = (path for path in Path(hpcrl.__file__).parent.rglob("*") if path.suffix in _OF_REPORTS)
    return max(path.stat().st_ctime_ns for path in files)


def project_of(
    title: str, runs: Sequence[Run], trials: Sequence[TrialFolder], link: Callable[[Run], Path | None]
) -> dict[str, Any]:
    """Return the content of a project's page. A run or a trial that cannot be read has its error in place of what is not known.

    Args:
        link: the report of a run, relative to the page; None: it has none.
    """
    settings = {run: _settings(run) for run in runs}
    usual = _usual([own for own in settings.values() if own])
    rows = [_row(run, settings[run], usual, link(run)) for run in runs]
    return {"title": title, "made": time.time(), "rows": rows, "trials": [_trial(folder) for folder in trials]}


def _settings(run: Run) -> dict[str, str]:
    try:
        values = flat(masked(tomli.loads(run.config.read_text(encoding="utf-8"))))
        return {path: value_as_toml(value) for path, value in values}
    except (OSError, ValueError, RecursionError):  # the row has the error of what reads the run
        return {}


def _usual(settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the value of each setting that most of the runs have."""
    counts = dict[str, dict[str, int]]()
    for own in settings:
        for path, value in own.items():
            of_path = counts.setdefault(path, {})
            of_path[value] = of_path.get(value, 0) + 1
    return {path: max(values, key=lambda value: values[value]) for path, values in counts.items()}


def _row(run: Run, settings: Mapping[str, str], usual: Mapping[str, str], report: Path | None) -> dict[str, Any]:
    unlike = [
        f"{path}={value}" for path, value in settings.items() if usual[path] != value and path not in _OF_EACH_RUN
    ]
    more = [f"and {len(unlike) - _MOST_DIFFERENCES} more"] if len(unlike) > _MOST_DIFFERENCES else []
    row: dict[str, Any] = {
        "project": run.project,
        "name": run.name,
        "report": quote(str(report)) if report else None,
        "seed": settings.get("trainer.seed"),
        "unlike": [*unlike[:_MOST_DIFFERENCES], *more],
        "error": "",
    }
    try:
        found, account, attempts = headline(run), account_of(run), read_attempts(run)
    except (HpcrlError, OSError, ValueError) as error:
        return row | {"error": str(error)}
    kind = found.outcome.kind if found.outcome else "running" if attempts else "pending"
    return row | {
        "state": kind,
        "started": attempts[0].started if attempts else None,
        "steps": found.steps,
        "score": rounded(found.eval_last[1] if found.eval_last else None),
        "first_score": rounded(found.eval_first[1] if found.eval_first else None),
        "loss": rounded(found.loss_last[1] if found.loss_last else None),
        "node_hours": account.total / _HOUR if account else None,
        "goodput": account.goodput if account else None,
    }


def _trial(folder: TrialFolder) -> dict[str, Any]:
    try:
        return describe_trial(folder)
    except (HpcrlError, OSError, ValueError) as error:
        return {"name": folder.name, "project": folder.project.name, "error": str(error)}
