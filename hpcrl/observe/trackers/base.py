"""Declares trackers, which keep the metrics of runs elsewhere, and returns those of a run. Your own is a function that returns one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcrl.rundir.layout import Run

_WRITTEN_ANYWAY = "tensorboard"


@dataclass(frozen=True)
class TrackedRun:
    """Facts of a run that a tracker receives.

    Attributes:
        key: the same in every attempt of the run, and another one for each repeated transfer: 21 letters and digits.
        group: trainer.group_name, else the sweep that the run belongs to.
        configuration: nested tables, as config.toml has them.
        folder: of this tracker's own files, in the run directory.
    """

    key: str
    project: str
    name: str
    group: str | None
    configuration: dict[str, Any]
    folder: Path


class Tracker(Protocol):
    """Takes metrics. Whatever it raises ends it for this attempt, and never the run; what it did not take is sent again later."""

    def log(self, step: int, metrics: Mapping[str, float], time: float, /) -> None:
        """Send values of a step, each name and step once; a step may come in several parts, also after later steps.

        Args:
            time: Unix time at which they were reported.
        """
        ...

    def close(self) -> None:
        """Return once all is where it belongs."""
        ...


Open = Callable[[TrackedRun], Tracker]


def trackers_of(logger: str | list[str]) -> list[str]:
    """Return the trackers that trainer.logger names, without TensorBoard, whose files every run has."""
    names = [logger] if isinstance(logger, str) else logger
    return [name for name in dict.fromkeys(names) if name != _WRITTEN_ANYWAY]


def senders(run: Run, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the process that sends to each tracker, by its name (hpcrl/runtime/followers.py)."""
    return {f"tracker-{name.replace(':', '.')}": ["hpcrl.observe.trackers.send", str(run.path), name] for name in names}
