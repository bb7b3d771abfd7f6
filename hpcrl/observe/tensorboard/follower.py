"""Follows the metrics of a running attempt and writes TensorBoard's view of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hpcrl.errors import HpcrlError
from hpcrl.rundir.layout import Run

if TYPE_CHECKING:
    from hpcrl.observe.tensorboard.event_file import EventFile

_EVERY_S, _LAST_TRIES = 2.0, 3


class Follower:
    """Keeps <run>/tensorboard up to date from a thread, as long as its `with` block lasts.

    TensorBoard's package is imported once an attempt has new metrics: models and engines need the cores until then.
    """

    def __init__(self, run: Run, every_s: float = _EVERY_S) -> None:
        self._ended, self._before = threading.Event(), _written(run)
        self._thread = threading.Thread(target=self._follow, args=(run, every_s), name="tensorboard", daemon=True)

    def _follow(self, run: Run, every_s: float) -> None:
        events = None
        while not self._ended.wait(every_s):
            if events or _written(run) != self._before:
                events = self._updated(run, events)
        for _ in range(_LAST_TRIES):
            if events := self._updated(run, events):
                events.close()
                return

    def _updated(self, run: Run, events: EventFile | None) -> EventFile | None:
        """Return the event file of the present metrics; None: it could not be written and has to be rewritten."""
        from hpcrl.observe.tensorboard.event_file import EventFile

        try:
            if events is None:
                return EventFile(run)
            events.update()
        except (OSError, HpcrlError) as error:  # without this thread nothing would be written any more
            print(f"{run.tensorboard} could not be written: {error}", flush=True)
            return None
        return events

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _written(run: Run) -> int:
    """Return how many bytes of metrics a run has."""
    try:
        return sum(path.stat().st_size for path in run.metrics.glob("*.jsonl"))
    except OSError:
        return 0
