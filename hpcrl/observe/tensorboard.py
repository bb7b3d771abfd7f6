"""TensorBoard's view of a run: one event file with content, made anew from the metrics at the start of each attempt.

Nothing is ever appended to a file of an earlier attempt. So a kill, a resume at an earlier step or a node with a slow clock
leaves neither doubled nor missing points, nor a curve that runs backwards.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from hpcrl.observe.metrics import MetricsReader, Record, last_reports
from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.layout import Run

_PREFIX = "events.out.tfevents."
_EVERY_S = 2.0
_LAST_TRIES = 3
_EMPTY_FILES = 20  # an open TensorBoard looks every few seconds; a file may be made anew several times in between


class EventFile:
    """The event file of a run; opening it removes those that were there."""

    def __init__(self, run: Run) -> None:
        self._directory = run.tensorboard
        self._run = run
        self._rebuild()

    def update(self) -> None:
        """Append what the metrics have gained; make the file anew if it is gone, or if points in it were reported again or became void."""
        records, outdated = self._reader.poll()
        if outdated or self._behind(records) or _is_empty(self._path):
            self.close()
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

    def close(self) -> None:
        self._file.close()

    def _rebuild(self) -> None:
        self._reader = MetricsReader(self._run)
        self._newest: dict[str, int] = {}
        self._latest, self._shifts = 0.0, dict[int, float]()
        records, _ = self._reader.poll()
        make_directory(self._directory)
        beside = self._directory / f".rebuilding.{socket.gethostname()}.{os.getpid()}"
        self._file = beside.open("wb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # A TensorBoard that is open forgets at this mark what it has read from the file before.
        self._write(Event(wall_time=time.time(), step=0, session_log=SessionLog(status=SessionLog.START)))
        self._append(last_reports(records))
        self._path = self._directory / self._name()
        for stale in self._directory.glob(".rebuilding.*"):
            if stale != beside:
                stale.unlink(missing_ok=True)
        earlier = sorted(self._directory.glob(_PREFIX + "*"))
        for old in earlier[-_EMPTY_FILES:]:
            _replace_by_nothing(old)
        for old in earlier[:-_EMPTY_FILES]:
            old.unlink(missing_ok=True)
        beside.rename(self._path)

    def _name(self) -> str:
        """Return a name that sorts after all there are, because a TensorBoard that is open follows files in this order."""
        stamps = [int(old.name.removeprefix(_PREFIX).partition(".")[0]) for old in self._directory.glob(_PREFIX + "*")]
        stamp = max(int(time.time()), *(stamp + 1 for stamp in stamps), 0)
        return f"{_PREFIX}{stamp:010d}.{socket.gethostname()}"

    def _append(self, records: Iterable[Record]) -> None:
        for record in records:
            self._newest |= dict.fromkeys(record.metrics, record.step)
            points = [Summary.Value(tag=tag, simple_value=value) for tag, value in record.metrics.items()]
            self._write(Event(wall_time=self._wall_time(record), step=record.step, summary=Summary(value=points)))
        self._file.flush()

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
        empty.rename(old)  # not truncated: whoever still writes to the old file writes to nowhere


def rebuild(run: Run) -> Path:
    """Make <run>/tensorboard anew from the metrics and return it."""
    EventFile(run).close()
    return run.tensorboard


class Follower:
    """Keeps <run>/tensorboard up to date from a thread, as long as its `with` block lasts."""

    def __init__(self, run: Run, every_s: float = _EVERY_S) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, args=(run, every_s), name="tensorboard", daemon=True)

    def _follow(self, run: Run, every_s: float) -> None:
        events = self._updated(run, None)
        while not self._ended.wait(every_s):
            events = self._updated(run, events)
        for _ in range(_LAST_TRIES):
            if events := self._updated(run, events):
                events.close()
                return

    def _updated(self, run: Run, events: EventFile | None) -> EventFile | None:
        """Return the event file as the metrics are now; None: it could not be written and has to be made anew."""
        try:
            if events is None:
                return EventFile(run)
            events.update()
        except OSError as error:  # without this thread nothing would be written any more
            print(f"{run.tensorboard} could not be written: {error}", flush=True)
            return None
        return events

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
