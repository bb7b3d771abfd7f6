"""Shows running runs: on a screen that is refreshed, or as lines without a terminal.

Files are read, and Slurm is asked, in threads of their own: what is drawn is the last that they know, with its age where that is long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live

from hpcrl.errors import HpcrlError, RunError
from hpcrl.launch.manage.poll import LOOK_S, RunPoller
from hpcrl.launch.manage.progress import progress_of
from hpcrl.launch.manage.registry import known_states
from hpcrl.launch.manage.screen import RunView, one_run, several_runs
from hpcrl.launch.manage.state import RunState
from hpcrl.launch.requeue.evaluation import describe_waiting
from hpcrl.observe.live_status import LiveStatusReader
from hpcrl.observe.summary import headline
from hpcrl.observe.summary_table import headline_rows, show_summary
from hpcrl.rundir.alerts import read_alerts
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import outcome_of, read_attempts
from hpcrl.runtime.process_status import read_process_statuses
from hpcrl.text import one_line
from hpcrl.upload.state import upload_states

_LAST_LOOK_S = 5.0
_WIDE = 300  # columns, where nothing says how many there are


def follow(runs: Sequence[Run], console: Console | None = None) -> None:
    """Show runs until all are over, then what they achieved; blocks.

    Args:
        console: where to; None: the standard output.

    Raises:
        RunError: a damaged file hides whether a run is over.
    """
    console, looks = console or Console(), Looks(runs)
    if draws(console):
        _draw(looks, console)
    else:
        _print(looks, console)
    views = looks.last()
    if len(runs) == 1:
        show_summary(runs[0], console)
    else:
        width = console.width if draws(console) else _WIDE
        console.print(*several_runs(views, width, len(runs)), sep="\n", soft_wrap=True)


def draws(console: Console) -> bool:
    """Return whether a screen can be drawn, and is wanted."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")


def read_view(run: Run, reader: LiveStatusReader) -> RunView:
    """Read the view of a run from its files.

    Raises:
        RunError: one of them is damaged.
        OSError: one of them cannot be read.
    """
    attempts = read_attempts(run)
    number = attempts[-1].number if attempts else 0
    try:
        statuses = read_process_statuses(run, number)
        progress = progress_of(run, statuses, ended=outcome_of(run, number) is not None)
        told = headline(run), reader.read(), read_alerts(run), upload_states(run), describe_waiting(run)
        return RunView(run, None, progress, *told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # numbers that are texts, and the like
        raise RunError(f"a file in {run.path} is damaged ({type(error).__name__}: {error})") from error


class Looks:
    """Views of runs, which threads read repeatedly until all are over, or this process ends."""

    def __init__(self, runs: Sequence[Run]) -> None:
        now = time.monotonic()
        self._runs, self._poller = runs, RunPoller(runs, known_states)
        self._readers = {run: LiveStatusReader(run) for run in runs}
        self._asked, self._states = now, dict[Run, RunState]()
        self._read = dict.fromkeys(runs, now)
        self._views = {run: RunView(run) for run in runs}
        self._failure: HpcrlError | None = None
        self._over = threading.Event()
        self._reader = self._begin(self._look)
        self._begin(self._ask)

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        def again() -> None:
            while not self.over():
                work()
                self.wait()

        thread = threading.Thread(target=again, daemon=True)
        thread.start()
        return thread

    def over(self) -> bool:
        """Return whether all runs are over, or cannot be asked for."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until the next look, or until all runs are over."""
        self._over.wait(LOOK_S)

    def views(self) -> list[RunView]:
        """Return the present views, in the order of the runs."""
        if self._failure:
            raise self._failure
        now, states = time.monotonic(), self._states
        return [
            replace(
                self._views[run],
                state=states.get(run),
                state_age=now - self._asked,
                files_age=now - self._read[run],
            )
            for run in self._runs
        ]

    def last(self) -> list[RunView]:
        """Return the views once all runs are over; as `views`."""
        self._reader.join(_LAST_LOOK_S)
        if not self._reader.is_alive():
            self._look()
        return self.views()

    def _ask(self) -> None:
        try:
            self._poller.over()
            self._states = dict(zip(self._runs, self._poller.states(), strict=True))
            self._asked = time.monotonic()
            if all(state.over for state in self._states.values()):
                self._over.set()
        except HpcrlError as error:
            self._failure = error
            self._over.set()
        except OSError:  # the age of what is known tells it
            return

    def _look(self) -> None:
        for run in self._runs:
            try:
                self._views[run] = read_view(run, self._readers[run])
            except (RunError, OSError) as error:
                self._views[run] = replace(self._views[run], complaint=str(error))
            self._read[run] = time.monotonic()


def _draw(looks: Looks, console: Console) -> None:
    while not looks.over():
        size = console.size
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not looks.over() and console.size == size:
                views, room = looks.views(), (size.width, size.height - 1)
                lines = one_run(views[0], *room) if len(views) == 1 else several_runs(views, *room)
                live.update(Group(*lines), refresh=True)
                looks.wait()
        if console.size != size:  # lines of another width are not where they were drawn any more
            console.clear()


def _print(looks: Looks, console: Console) -> None:
    printed: dict[tuple[Run, str], str] = {}
    while not looks.over():
        _print_changes(looks.views(), printed, console)
        looks.wait()
    _print_changes(looks.last(), printed, console)


def _print_changes(views: Sequence[RunView], printed: dict[tuple[Run, str], str], console: Console) -> None:
    for view in views:
        for what, state, text in events(view):
            if printed.get((view.run, what)) != state:
                printed[view.run, what] = state
                name = f"{view.run.name} " if len(views) > 1 else ""
                line = one_line(f"{time.strftime('%H:%M:%S')} {name}{what:<12} {text}")
                console.print(line, markup=False, highlight=False, soft_wrap=True)
                console.file.flush()


def events(view: RunView) -> Iterator[tuple[str, str, str]]:
    """Yield the messages about a run: subject, state, and the text, which is printed when the state changes."""
    state = view.state
    if state and state.kind != "running" and not state.over:
        text = view.detail if view.detail.startswith(state.kind) else f"{state.kind}: {view.detail}"
        yield "run", f"{state.kind} {state.job.reason}", text
    for row in view.live.rows if view.live else ():
        yield row.process, row.state, _numbers(view) if row.process == "trainer" else row.text
    for name, text in headline_rows(view.headline) if view.headline else ():
        if name in ("eval score", "validation loss", "learning"):
            yield name, "nothing" if name == "learning" else text, text
    for alert in view.alerts:
        yield f"alert {alert.name} {alert.begin.step}", str(alert.cleared), str(alert)
    if view.complaint:
        yield "trouble", view.complaint, view.complaint


def _numbers(view: RunView) -> str:
    live = view.live
    reward = f" · reward {live.curve[-1]:.2f}" if live and live.is_reward and live.curve else ""
    return f"{view.progress}{reward}"
