"""The processes that send a run's metrics to its trackers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hpcrl.rundir.layout import Run
from hpcrl.runtime.followers import Followers

_WRITTEN_ANYWAY = "tensorboard"
_LAST_WORDS_S = 15.0


def trackers_of(logger: str | list[str]) -> list[str]:
    """Return the trackers that trainer.logger names, without TensorBoard, whose files every run has."""
    names = [logger] if isinstance(logger, str) else logger
    return [name for name in dict.fromkeys(names) if name != _WRITTEN_ANYWAY]


@contextmanager
def trackers(run: Run, attempt: int, names: Iterable[str]) -> Iterator[Followers]:
    """One process per tracker, for as long as the `with` block lasts."""
    commands = {
        f"tracker-{name.replace(':', '.')}": ("hpcrl.observe.trackers.send", str(run.path), name) for name in names
    }
    followers = Followers(run, attempt, commands)
    try:
        followers.start()
        yield followers
    finally:
        followers.end(_LAST_WORDS_S)
