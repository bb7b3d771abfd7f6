"""Writes TensorBoard's view of a run: one event file with content, written again from the metrics with the first ones of each attempt.

Nothing is ever appended to a file of an earlier attempt. So a kill, a resume at an earlier step or a node with a slow clock
leaves neither doubled nor missing points, nor a curve that runs backwards.

A metric that was 0 in every step is left out, except those of rewards and evaluations; with its first other value the file is rewritten.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from hpcrl.observe.evaluations import success_reward_of
from hpcrl.observe.metrics import MetricsReader, Record, last_reports
from hpcrl.observe.summary import EVAL_SCORE, STEP_SECONDS
from hpcrl.observe.tensorboard import summaries, texts
from hpcrl.observe.tensorboard.hparams import hparams_of
from hpcrl.observe.tensorboard.overview import is_always_shown, layout_of, points_of
from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
from hpcrl.rundir.other_roots import require_folders

_PREFIX = "events.out.tfevents."
_DISTRIBUTION = "z_distribution/"
"""TensorBoard opens with what sorts first, and shows curves and histograms together: histograms come last."""
_EMPTY_FILES = 20  # an open TensorBoard looks every few seconds; a file may be rewritten several times in between


class EventFile:
    """The event file of a run; opening it removes those that were there."""

    def __init__(self, run: Run) -> None:
        self._directory = run.events
        self._run, self._success_reward = run, success_reward_of(run)
        self._rebuild()

    def update(self) -> None:
        """Append new metrics. Rewrite the file if it is gone, if points in it were reported again or became void, or if a metric
        that it left out has to appear."""
        records, outdated = self._reader.poll()
        if outdated or self._behind(records) or self._to_show(records) or _is_empty(self._path):
            self._file.close()
            self._rebuild()
        else:
            self._append(records)

    def _behind(self, records: list[Record]) -> bool:
        """Return whether one of these has a value of a step up to which the file has values of that name: it may be there already."""
        newest = dict(self._newest)
        for record in records:
            if any(newest.get(tag, -1) >= record.step for tag in record.metrics):
                return True
            newest |= dict.fromkeys(record.metrics, record.step)
        return False

    def _to_show(self, records: list[Record]) -> bool:
        """Return whether these make something of the file worth showing that was left out."""
        shown = self._shown | self._informative(records)
        return bool(shown & self._left_out) or layout_of(shown, self._success_reward) != self._layout

    def _informative(self, records: Iterable[Record]) -> set[str]:
        return {
            tag
            for record in records
            for tag, value in self._points(record).items()
            if value != 0 or is_always_shown(tag)
        }

    def _points(self, record: Record) -> Mapping[str, float]:
        return points_of(record, self._several)

    def close(self) -> None:
        """Add the summary of what the run has achieved."""
        if self._trained > self._summarised:
            self._write_summary()
        self._file.close()

    def _rebuild(self) -> None:
        self._reader = MetricsReader(self._run)
        self._newest: dict[str, int] = {}
        self._latest, self._shifts = 0.0, dict[int, float]()
        self._trained = self._summarised = 0
        records, _ = self._reader.poll()
        self._several = len(read_attempts(self._run)) > 1
        self._shown, self._left_out = self._informative(records), set[str]()
        self._layout = layout_of(self._shown, self._success_reward)
        make_directory(self._directory)
        beside = self._directory / f".rebuilding.{socket.gethostname()}.{os.getpid()}"
        self._file = beside.open("wb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # A TensorBoard that is open forgets at this mark what it has read from the file before.
        self._write(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        self._write_values(time.time(), 0, self._facts())
        self._append(last_reports(records))
        if self._trained:
            self._write_summary()
        self._path = self._directory / self._name()
        for stale in self._directory.glob(".rebuilding.*"):
            if stale != beside:
                stale.unlink(missing_ok=True)
        earlier = sorted(self._directory.glob(_PREFIX + "*"))
        for old in earlier[-_EMPTY_FILES:]:
            _replace_by_nothing(old)
        for old in [*earlier[:-_EMPTY_FILES], *self._run.tensorboard.glob(_PREFIX + "*")]:
            old.unlink(missing_ok=True)
        beside.rename(self._path)

    def _facts(self) -> Iterator[Any]:
        if self._layout:
            yield summaries.layout(self._layout)
        if self._run.config.is_file():
            yield from (summaries.marker(tag, metadata) for tag, metadata in hparams_of(self._run))
            yield summaries.text("run/configuration", texts.configuration(self._run))
        if self._several:
            yield summaries.text("run/attempts", texts.attempts(self._run))

    def _write_summary(self) -> None:
        self._write_values(self._latest, self._trained, [summaries.text("run/summary", texts.summary(self._run))])
        self._file.flush()
        self._summarised = self._trained

    def _name(self) -> str:
        """Return a name that sorts after all there are, because a TensorBoard that is open follows files in this order."""
        stamps = [int(old.name.removeprefix(_PREFIX).partition(".")[0]) for old in self._directory.glob(_PREFIX + "*")]
        stamp = max(int(time.time()), *(stamp + 1 for stamp in stamps), 0)
        return f"{_PREFIX}{stamp:010d}.{socket.gethostname()}"

    def _append(self, records: Iterable[Record]) -> None:
        for record in records:
            self._newest |= dict.fromkeys(record.metrics, record.step)
            points = self._points(record)
            shown = {tag: value for tag, value in points.items() if tag in self._shown or self._says(tag, value)}
            self._left_out |= points.keys() - shown.keys()
            if STEP_SECONDS in record.metrics:
                self._trained = record.step
            self._write_values(self._wall_time(record), record.step, self._values(record, shown))
        self._file.flush()

    def _says(self, tag: str, value: float) -> bool:
        if value == 0 and not is_always_shown(tag):
            return False
        self._shown.add(tag)
        return True

    def _values(self, record: Record, shown: Mapping[str, float]) -> Iterator[Any]:
        yield from summaries.scalars(shown)
        yield from (summaries.histogram(f"{_DISTRIBUTION}{tag}", shape) for tag, shape in record.histograms.items())
        if EVAL_SCORE in record.metrics:
            if samples := texts.evaluated(self._run, record.step):
                yield summaries.text("evaluation/samples", samples)
            for name, png in texts.pictures(self._run, record.step):
                yield summaries.picture(f"evaluation/{name}", png)

    def _write_values(self, wall_time: float, step: int, values: Iterable[Any]) -> None:
        self._write(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def _wall_time(self, record: Record) -> float:
        """Return when a record was written; an attempt on a node whose clock is behind is moved to after those before it.

        Over wall time a curve would run backwards otherwise.
        """
        if record.attempt not in self._shifts:
            self._shifts[record.attempt] = max(0.0, self._latest - record.time)
        moved = record.time + self._shifts[record.attempt]
        self._latest = max(self._latest, moved)
        return moved

    def _write(self, event: Event) -> None:
        RecordWriter(self._file).write(event.SerializeToString())


def _is_empty(path: Path) -> bool:
    return not path.exists() or path.stat().st_size == 0


def _replace_by_nothing(old: Path) -> None:
    """Leave an empty file in the place of an old event file.

    An open TensorBoard goes on to the next file from one that is empty; it hangs at one that is gone.
    """
    if not _is_empty(old):
        empty = old.with_name(f".rebuilding.{socket.gethostname()}.{os.getpid()}.empty")
        empty.touch()
        empty.rename(old)  # not truncated: a late writer of the old file writes to nowhere


def rebuild(run: Run) -> Path:
    """Write <run>/tensorboard again from the metrics and return it.

    Raises:
        DataError: it lies below another root and is not there.
    """
    require_folders(run, run.tensorboard)
    EventFile(run).close()
    return run.tensorboard
