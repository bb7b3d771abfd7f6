"""Formats the summary of a run as rows of a table."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcrl.observe.summary import Headline, Summary, summarise
from hpcrl.rundir.layout import Run
from hpcrl.text import one_line
from hpcrl.units import duration


def show_summary(run: Run, console: Console) -> None:
    """Print what a run has achieved, where it is, and how to look at its curves."""
    table = Table(title=Text(f"{run.project}/{run.name}"), show_header=False, title_justify="left")
    for name, value in summary_rows(summarise(run)):
        table.add_row(name, Text(one_line(value)))
    console.print(table)
    for line in (
        f"run directory  {run.path}",
        f"curves         {shlex.join(['hpcrl', 'tensorboard', str(run.path)])}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return name and value of everything that is known."""
    *achieved, steps, time = headline_rows(summary)
    rows = [
        ("outcome", f"{summary.outcome.kind}: {summary.outcome.message}" if summary.outcome else None),
        *achieved,
        steps,
        ("samples", f"{summary.samples:,}" if summary.samples is not None else None),
        ("tokens/s", f"{summary.tokens_per_second:,.0f} on average" if summary.tokens_per_second is not None else None),
        ("s/step", f"{summary.seconds_per_step:.2f}" if summary.seconds_per_step is not None else None),
        ("pause per update", _pause(summary)),
        time,
    ]
    return [(name, value) for name, value in rows if value is not None]


def headline_rows(headline: Headline) -> list[tuple[str, str]]:
    """Return name and value of what a list of runs knows; steps and time are the last two."""
    attempts = f" in {headline.attempts} attempts" if headline.attempts > 1 else ""
    rows = [
        ("eval score", _change(headline.eval_first, headline.eval_last)),
        ("validation loss", _change(headline.loss_first, headline.loss_last)),
        ("reward", _change(headline.reward_first, headline.reward_last)),
        ("learning", headline.learning or None),
        ("steps", str(headline.steps)),
        ("time", duration(headline.seconds) + attempts),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _change(first: tuple[int, float] | None, last: tuple[int, float] | None) -> str | None:
    if first is None or last is None:
        return None
    if first == last:
        return f"{last[1]:.3f} (step {last[0]})"
    return f"{first[1]:.3f} (step {first[0]}) → {last[1]:.3f} (step {last[0]})"


def _pause(summary: Summary) -> str | None:
    if summary.pause_mean is None or summary.pause_max is None:
        return None
    return f"{summary.pause_mean * 1000:.0f} ms on average, {summary.pause_max * 1000:.0f} ms at most"
