"""Formats runs as lines for a terminal of any size. Nothing here reads or waits."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from rich.text import Text

from hpcrl.launch.manage.progress import Progress
from hpcrl.launch.manage.state import RunState, explain
from hpcrl.launch.scheduler import JobState
from hpcrl.observe.live_status import LiveStatus
from hpcrl.observe.summary import Headline
from hpcrl.observe.summary_table import headline_rows
from hpcrl.rundir.alerts import Alert
from hpcrl.rundir.layout import Run
from hpcrl.text import one_line
from hpcrl.units import duration
from hpcrl.upload.state import UploadState

_LEVELS = "▁▂▃▄▅▆▇█"
_STALE_S, _UNASKED_S = 10.0, 45.0
_MOST_ALERTS = 3
_MOST_WAITS = 2
_MOST_DETAIL = 3
_CURVE = 40
_GOOD, _WAITS = ("running", "saving", "done"), ("pending", "starting", "preempted", "ending", "suspended")
# what a window that is too low shows before the rest
_FIRST = (
    "progress", "alert", "learning", "next", "reward", "loss", "eval score", "process", "tokens/s", "checkpoint", "memory",
)  # fmt: skip


@dataclass(frozen=True)
class RunView:
    """View of a run: its state, progress, headline, live status and alerts.

    Attributes:
        state: None while nothing has been asked for yet; progress, headline and live: while nothing has been read.
        state_age, files_age: seconds since that was so.
        evaluation: versions that wait for the evaluation job; or empty.
        complaint: why it could not be read the last time.
    """

    run: Run
    state: RunState | None = None
    progress: Progress | None = None
    headline: Headline | None = None
    live: LiveStatus | None = None
    alerts: Sequence[Alert] = ()
    uploads: Mapping[str, UploadState] = field(default_factory=dict)
    evaluation: str = ""
    state_age: float = 0.0
    files_age: float = 0.0
    complaint: str = ""

    @property
    def name(self) -> str:
        return f"{self.run.project}/{self.run.name}"

    @property
    def kind(self) -> str:
        return self.state.kind if self.state else "not known yet"

    @property
    def detail(self) -> str:
        """Why it waits, how far it is, what it has achieved, or its first error."""
        if self.state is None:
            return str(self.progress or "")
        if self.state.kind == "done":
            return str(self.headline or "") or self.state.detail
        at_work = self.state.kind == "running" and self.state.job.known and self.progress is not None
        # its files are looked at more often than Slurm is asked
        return (
            str(self.progress)
            if at_work and self.progress and self.progress.activity != "finished"
            else self.state.detail
        )

    @property
    def share(self) -> float | None:
        """Of all steps, those that are done; None where that is not known."""
        total = self.progress.total if self.progress else None
        return min(1.0, self.headline.steps / total) if total and self.headline else None

    @property
    def lasting(self) -> list[Alert]:
        return [alert for alert in self.alerts if alert.cleared is None]


def details(view: RunView) -> list[tuple[str, str]]:
    """Return label and text of all that is known beside state and detail, in the order in which it is shown."""
    state, live = view.state, view.live
    rows = [("next", state.advice if state else "")]
    if view.share is not None and not (state and state.over):
        rows.append(("progress", f"{bar(view.share, 30)} {view.share:.0%}"))
    achieved = dict(headline_rows(view.headline)) if view.headline and view.headline.steps else {}
    curve = sparkline(live.curve, _CURVE) if live and len(live.curve) > 1 else ""
    if live and not live.is_reward:
        achieved["loss"] = f"{live.curve[0]:.3f} → {live.curve[-1]:.3f}"
    for name, text in achieved.items():
        rows.append((name, f"{text}  {curve}".rstrip() if name in ("reward", "loss") else text))
    if live and live.tokens_per_second is not None:
        rows.append(("tokens/s", f"{live.tokens_per_second:,.0f} in the newest step"))
    if live and live.peaks:
        rows.append(("memory", f"{', '.join(live.peaks)} (the trainer rank that needed most)"))
    rows.append(("goodput", live.goodput if live else ""))
    rows += [("waiting", line) for line in live.waits[:_MOST_WAITS]] if live else []
    rows += [("alert", str(alert)) for alert in view.alerts[-_MOST_ALERTS:]]
    if len(view.alerts) > _MOST_ALERTS:
        rows.append(("", f"and {len(view.alerts) - _MOST_ALERTS} earlier ones in {view.run.alerts}"))
    rows.append(("evaluation", view.evaluation))
    rows += [(f"upload {store}", line) for store, upload in view.uploads.items() for line in upload.lines()]
    return [row for row in [*rows, *_origin(view), *_processes(view), *_ages(view)] if row[1]]


def _origin(view: RunView) -> list[tuple[str, str]]:
    state, progress = view.state, view.progress
    rows = [("checkpoint", (progress.checkpoint if progress else None) or "none")]
    if state:
        submission = state.submission
        found = ", found in the queue: its submission was cut short" if state.found else ""
        job = f"{submission.get('job_id', '-')} ({submission.get('executor', '-')}, {state.job.name.lower()}{found})"
        rows += [
            ("attempt", f"{state.attempt} ({state.layout})" if state.layout else str(state.attempt)),
            ("job", job),
            *((f"request {name}", waits_as(*request)) for name, request in state.requests.items() if name),
            ("overrides", " ".join(submission.get("overrides", []))),
        ]
    return [*rows, ("directory", str(view.run.path))]


def waits_as(job: str, state: JobState) -> str:
    """Return the state of a request's job, and why it waits, for people."""
    return f"{job}, {state.name.lower()}" + (f": {explain(state, job)}" if state.waiting else "")


def _processes(view: RunView) -> list[tuple[str, str]]:
    if view.live is None or (view.state and view.state.over):
        return []
    by_interest = sorted(view.live.rows, key=lambda row: (row.process != "trainer", row.process.startswith("agent")))
    return [(row.process, row.text) for row in by_interest]


def _ages(view: RunView) -> list[tuple[str, str]]:
    rows = [("trouble", view.complaint)]
    if view.files_age > _STALE_S:
        rows.append(("trouble", f"this is {duration(view.files_age)} old: the filesystem does not answer"))
    if view.state_age > _UNASKED_S:
        rows.append(("trouble", f"the state is {duration(view.state_age)} old: Slurm does not answer"))
    return rows


def one_run(view: RunView, width: int, height: int) -> list[Text]:
    """Return at most `height` lines of at most `width` columns."""
    title = Text(f"{one_line(view.name)}: ", style="bold")
    title.append(view.kind, style=_style(view.kind))
    detail = textwrap.wrap(one_line(view.detail), max(20, width - 2), max_lines=_MOST_DETAIL, placeholder=" …")
    lines = [title, *(Text(f"  {line}") for line in detail)]
    rows = details(view)
    room = max(0, height - len(lines))
    known = {row.process for row in view.live.rows} if view.live else set[str]()
    ranks = [_rank("process" if label in known else label) for label, _ in rows]
    kept = sorted(sorted(range(len(rows)), key=lambda index: ranks[index])[:room])
    label_width = max((len(one_line(rows[index][0])) for index in kept), default=0)
    for index in kept:
        label, text = rows[index]
        style = "bold red" if label in ("alert", "learning", "trouble") else ""
        lines.append(Text(f"  {one_line(label):<{label_width}}  ", style="dim").append(one_line(text), style=style))
    return [_cut(line, width) for line in lines[:height]]


def _rank(label: str) -> int:
    if label == "trouble":
        return -1
    return _FIRST.index(label) if label in _FIRST else len(_FIRST)


def several_runs(views: Sequence[RunView], width: int, height: int) -> list[Text]:
    """Return a line per run, those that are at work before the others where there is no room for all."""
    room = len(views) if len(views) <= height else max(0, height - 1)
    by_interest = sorted(range(len(views)), key=lambda index: (views[index].kind not in _GOOD[:2], index))
    kept = sorted(by_interest[:room])
    name_width = max((len(views[index].run.name) for index in kept), default=0)
    lines = [_line(views[index], min(name_width, width // 3)) for index in kept]
    if len(kept) < len(views):
        rest = Counter(view.kind for index, view in enumerate(views) if index not in kept)
        lines.append(Text(f"and {', '.join(f'{count} {kind}' for kind, count in rest.items())}", style="dim"))
    return [_cut(line, width) for line in lines[:height]]


def _line(view: RunView, name_width: int) -> Text:
    line = _cut(Text(one_line(view.run.name)), name_width)
    line.pad_right(name_width - line.cell_len)
    line.append(f"  {view.kind:<9} ", style=_style(view.kind))
    if view.share is not None:
        line.append(f"{bar(view.share, 8)} ")
    if view.lasting:
        line.append(f"! {one_line(view.lasting[-1].name)}  ", style="bold red")
    if view.live and view.live.curve:
        line.append(f"{view.live.curve[-1]:.3f} {sparkline(view.live.curve, 8)}  ")
    return line.append(one_line(view.detail))


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def _style(kind: str) -> str:
    return "green" if kind in _GOOD else "yellow" if kind in _WAITS else "red" if kind != "not known yet" else "dim"


def bar(share: float, width: int) -> str:
    """Return a bar of which this share is filled."""
    filled = int(share * width)
    return "█" * filled + "░" * (width - filled)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of one character per value, or per mean of several where there are more than `width`; a blank is no number."""
    count = min(width, len(values))
    ends = [len(values) * index // count for index in range(count + 1)] if count else [0]
    means = [fmean(values[first:last]) for first, last in pairwise(ends)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / (len(_LEVELS) - 1) or 1.0
    return "".join(_LEVELS[round((mean - low) / step)] if abs(mean) < float("inf") else " " for mean in means)
