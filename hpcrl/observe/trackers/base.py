"""What a tracker is: something that keeps the metrics of runs elsewhere. Your own is a function that returns one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run.

    Attributes:
        key: the same in every attempt of the run, and another one for each time it is sent anew: 21 letters and digits.
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
        """Take values of a step, each name and step once; a step may come in several parts, also after later steps.

        Args:
            time: Unix time at which they were reported.
        """
        ...

    def close(self) -> None:
        """Return once all is where it belongs."""
        ...


Open = Callable[[TrackedRun], Tracker]
