"""Keeps TensorBoard's view of a run up to date while the run goes on."""

from __future__ import annotations

import threading

from hpcrl.errors import HpcrlError
from hpcrl.observe.tensorboard.event_file import EventFile
from hpcrl.rundir.layout import Run

_EVERY_S = 2.0
_LAST_TRIES = 3


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
