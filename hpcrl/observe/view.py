"""A run on the terminal: one live line per process while it goes on, a table when it is over.

Where the output is no terminal: one plain line whenever the state of a process changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcrl.observe.summary import Summary, summarise
from hpcrl.observe.watch import ProcessRow, Watch
from hpcrl.rundir.layout import Run
from hpcrl.text import one_line
from hpcrl.units import duration

_LOOK_S = 0.5


def follow(run: Run, attempt_done: Callable[[], bool], console: Console | None = None) -> None:
    """Show a run until `attempt_done` says that it is over, then its summary; blocks.

    Args:
        attempt_done: is asked twice a second.
        console: where to; None: the standard output.
    """
    console, watch = console or Console(), Watch(run)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            _watch(watch, attempt_done, lambda rows: live.update(_board(run, rows), refresh=True))
    else:
        _watch(watch, attempt_done, _Lines(console).show)
    show_summary(run, console)


def _watch(watch: Watch, done: Callable[[], bool], show: Callable[[list[ProcessRow]], None]) -> None:
    while True:
        over = done()
        show(watch.look())
        if over:
            return
        time.sleep(_LOOK_S)


def _board(run: Run, rows: list[ProcessRow]) -> Group:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(width=20)
    grid.add_column(overflow="ellipsis", no_wrap=True)
    for row in rows:
        bar = "" if row.share is None else ProgressBar(total=1.0, completed=row.share, width=20)
        grid.add_row(Text(one_line(row.process)), bar, Text(one_line(row.text)))
    return Group(Text(f"{run.project}/{run.name}", style="dim"), grid)


class _Lines:
    """Prints a row when the state of its process has changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}

    def show(self, rows: list[ProcessRow]) -> None:
        for row in rows:
            if self._said.get(row.process) != row.state:
                self._said[row.process] = row.state
                line = one_line(f"{time.strftime('%H:%M:%S')} {row.process:<12} {row.text}")
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
                self._console.file.flush()


def show_summary(run: Run, console: Console) -> None:
    """Print what a run has achieved, where it is, and how to look at its curves."""
    table = Table(title=Text(f"{run.project}/{run.name}"), show_header=False, title_justify="left")
    for name, value in summary_rows(summarise(run)):
        table.add_row(name, Text(one_line(value)))
    console.print(table)
    for line in (f"run directory  {run.path}", f"curves         tensorboard --logdir {run.tensorboard}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return name and value of everything that is known."""
    rows = [
        ("outcome", f"{summary.outcome.kind}: {summary.outcome.message}" if summary.outcome else None),
        ("eval score", _change(summary.eval_first, summary.eval_last)),
        ("validation loss", _change(summary.loss_first, summary.loss_last)),
        ("reward", _change(summary.reward_first, summary.reward_last)),
        ("steps", str(summary.steps)),
        ("samples", f"{summary.samples:,}" if summary.samples is not None else None),
        ("tokens/s", f"{summary.tokens_per_second:,.0f}" if summary.tokens_per_second is not None else None),
        ("s/step", f"{summary.seconds_per_step:.2f}" if summary.seconds_per_step is not None else None),
        ("pause per update", _pause(summary)),
        ("time", duration(summary.seconds) + (f" in {summary.attempts} attempts" if summary.attempts > 1 else "")),
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
