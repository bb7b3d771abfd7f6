"""State of a run's copies in a store, uploads/<store>.json: for `hpcrl status`, and to spend no request twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.rundir.commit import children, read_bytes, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import parse_record, with_checksum
from hpcrl.types import LARGEST
from hpcrl.units import duration, readable_size

_SILENT_S = 120.0


@dataclass
class UploadState:
    """Uploads to one store, each by its name, such as exports/s000040.

    Attributes:
        target: settings of the store; the state of another store does not count.
        place: address in the store.
        sent: commit mark, bytes and Unix time of what the store has.
        failed: errors of directories that it lacks; they are tried again.
        given_up: those that the run deleted while they were sent.
        now: name, bytes in the store, bytes in all and Unix time of what is being sent.
    """

    target: str = ""
    place: str = ""
    sent: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    now: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> UploadState:
        """Return the recorded state; empty where it is missing or damaged: the store is queried then."""
        content = read_bytes(path)
        try:
            found = cls(**parse_record(content, required=True)[0]) if content is not None else cls()
        except (ValueError, TypeError):
            return cls()
        return found if found._is_whole() else cls()

    def _is_whole(self) -> bool:
        """Return whether each field has its type: a run below a shared root may be anybody's."""
        sent, now = self.sent, self.now
        return (
            isinstance(self.target, str)
            and isinstance(self.place, str)
            and isinstance(sent, dict)
            and all(_has(one, "mark", "bytes", "time") for one in sent.values())
            and all(isinstance(one, dict) for one in (self.failed, self.given_up))
            and all(isinstance(why, str) for why in (*self.failed.values(), *self.given_up.values()))
            and (now is None or _has(now, "name", "bytes", "total", "time"))
        )

    def write(self, path: Path) -> None:
        """Write it; an upload does not end because that cannot be done."""
        try:
            write_text(path, with_checksum(asdict(self))[0])
        except OSError as error:
            print(f"{path} could not be written: {error}", flush=True)

    def lines(self) -> Iterator[str]:
        """Yield what people want to know, one line each."""
        if self.sent:
            newest = max(self.sent, key=lambda name: self.sent[name]["time"])
            yield f"{len(self.sent)} in {self.place}, last {newest}"
        if self.now:
            done, total, age = self.now["bytes"], self.now["total"], time.time() - self.now["time"]
            silent = f", nothing heard for {duration(age)}" if age > _SILENT_S else ""
            yield f"sending {self.now['name']}, {readable_size(done)} of {readable_size(total)}{silent}"
        for name, why in self.failed.items():
            yield f"{name} failed: {why}"
        for name, why in self.given_up.items():
            yield f"{name} given up: {why}"


def upload_states(run: Run) -> dict[str, UploadState]:
    """Return the state of uploads to each store."""
    names = sorted(name for name in children(run.uploads) if name.endswith(".json") and name[0] != ".")
    return {name.removesuffix(".json"): UploadState.read(run.uploads / name) for name in names}


def _has(value: Any, text: str, *numbers: str) -> bool:
    """Return whether a record has a text and finite numbers under these names."""
    if not isinstance(value, dict) or not isinstance(value.get(text), str):
        return False
    found = [value.get(name) for name in numbers]
    return all(isinstance(one, (int, float)) and not isinstance(one, bool) and abs(one) <= LARGEST for one in found)
