"""Sends the metrics of a run to a tracker, each value of a step once: python -m hpcrl.observe.trackers.send RUN TRACKER

It goes on until its standard input ends. A process of its own, because a tracker may be slow, hang or die.

What was sent stands in trackers/<tracker>.json, by name of a metric the newest step. A value that an attempt sent of a step that a later one
trains again stays what it was: trackers take back nothing. A kill between sending and writing that down sends the same value again, with the
same time.
"""

from __future__ import annotations

import secrets
import string
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import tomli

from hpcrl.config import Config
from hpcrl.config.import_path import find
from hpcrl.config.secrets import masked
from hpcrl.errors import HpcrlError, RunError
from hpcrl.observe.metrics import MetricsReader, last_reports
from hpcrl.observe.trackers.base import TrackedRun, Tracker
from hpcrl.observe.trackers.packages import TRACKERS
from hpcrl.rundir.commit import make_directory, write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import as_record, read_object
from hpcrl.runtime.followers import more

_KEY_LETTERS = string.ascii_lowercase + string.digits
_SWEEP = "."
_REMEDY = "send all of it as a run of its own with `hpcrl sync --anew`"


@dataclass
class Sent:
    """Record of the values that a tracker has of a run.

    Attributes:
        name: of the run there.
        steps: by name of a metric, the newest step sent.
    """

    name: str

    key: str = field(default_factory=lambda: "".join(secrets.choice(_KEY_LETTERS) for _ in range(21)))
    steps: dict[str, int] = field(default_factory=dict)


class MetricSender:
    """Sends a run's metrics to one tracker.

    Args:
        anew: as a run of its own, all that counts now.
    """

    def __init__(self, run: Run, name: str, anew: bool = False) -> None:
        self._path = run.tracker(name)
        make_directory(self._path.parent)
        kept = None if anew else read_object(self._path, _REMEDY)
        self._sent = Sent(run.name) if kept is None else as_record(Sent, kept, self._path, _REMEDY)
        self._reader = MetricsReader(run)
        if anew:
            self._sent.name = f"{run.name}-{self._sent.key[:6]}"
        self._tracker = _opened(
            name, _tracked(run, name, self._sent, Config.from_toml([run.config]).trainer.group_name)
        )
        self._save()

    def send(self) -> int:
        """Send what is new and return how many values that were."""
        records, _ = self._reader.poll()
        count = 0
        for record in last_reports(records):
            new = {
                name: value for name, value in record.metrics.items() if record.step > self._sent.steps.get(name, -1)
            }
            if new:
                self._tracker.log(record.step, new, record.time)
                self._sent.steps |= dict.fromkeys(new, record.step)
                self._save()
                count += len(new)
        return count

    def close(self) -> None:
        self._tracker.close()

    def _save(self) -> None:
        write_json(self._path, asdict(self._sent))


def _tracked(run: Run, name: str, sent: Sent, group: str | None) -> TrackedRun:
    sweep = run.name.partition(_SWEEP)[0] if _SWEEP in run.name else None
    folder = run.tracker(name).with_suffix("")
    make_directory(folder)
    configuration = masked(tomli.loads(run.config.read_text(encoding="utf-8")))
    return TrackedRun(sent.key, run.project, sent.name, group or sweep, configuration, folder)


def _opened(name: str, run: TrackedRun) -> Tracker:
    try:
        return find("trainer.logger", name, TRACKERS)(run)
    except ImportError as error:
        raise RunError(
            f"tracker {name}: {error}; install it where the controller runs (pip install 'hpcrl[{name}]'), then "
            f"`hpcrl sync {run.name} --to {name}` sends what is missing"
        ) from error


def main(path: str, name: str, again: Callable[[], bool]) -> None:
    """Send until `again` returns False."""
    sender = MetricSender(Run.open(path), name)
    while again():
        sender.send()
    sender.send()
    sender.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], more)
    except HpcrlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
