"""Writes and reads the metrics of a run: one JSON-lines file per process, from which TensorBoard and summaries are derived.

    {"attempt": 2, "resume": 40}                                                      a writer starts
    {"attempt": 2, "step": 41, "time": 1763666666.5, "metrics": {"policy/lr": 1e-6}, "histograms": {"reward": [0.0, 1.0, [3, 5]]}}

An attempt that continues after step k makes lines of earlier attempts about later steps void, in every file. The attempt's number
decides this, not the place in a file, so a writer that was thought dead cannot bring such a step back. Two attempts may still report a value
twice, when the second one continued at that step and trained nothing; then the last one counts.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hpcrl.faults import fault
from hpcrl.rundir.commit import make_directory, open_file, parse_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import EVALUATION
from hpcrl.rundir.space import explained

_ALONE = ("trainer", "controller")
_BLOCK = 1 << 16
_BINS = 20
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Histogram:
    """Distribution of the values of one step.

    Attributes:
        low, high: ends of the bins, which are equally wide; `high` belongs to the last one.
        counts: values in each bin.
    """

    low: float
    high: float
    counts: list[int]

    @classmethod
    def of(cls, values: Sequence[float]) -> Histogram | None:
        """Return the histogram of values, those that are not finite left out; None where none are."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return None
        low, high = float(min(finite)), float(max(finite))
        counts = [0] * (_BINS if high > low else 1)
        for value in finite:
            counts[bin_of(value, low, high, len(counts))] += 1
        return cls(low, high, counts)


def bin_of(value: float, low: float, high: float, bins: int) -> int:
    return min(int((value - low) / (high - low) * bins), bins - 1) if high > low else 0


@dataclass(frozen=True)
class Record:
    """Report of one process about one step.

    Attributes:
        process: name of its writer: "trainer", "controller", "rollout-0".
        time: Unix time at the writer's clock.
        metrics: by names that are unique in the run: of replicas, which report alike, the process is added ("timing/x/rollout-0").
        histograms: by names of their own, likewise.
    """

    process: str
    attempt: int
    step: int
    time: float
    metrics: dict[str, float]
    histograms: dict[str, Histogram] = field(default_factory=dict)


class MetricsWriter:
    """Appends the metrics of one process; the only writer of its file.

    Args:
        resume_step: step after which this attempt continues; 0 for a fresh start; None: other processes report that.
    """

    def __init__(self, run: Run, process: str, attempt: int, resume_step: int | None) -> None:
        path = run.metrics_of(process)
        self._path, self._attempt = path, attempt
        with explained(path):
            make_directory(path.parent)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._descriptor).st_size
        torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        # A writer that was killed may have left half a line, which must not swallow the next one.
        self._before = b"\n" if torn else b""
        if resume_step is not None:
            self._append({"attempt": attempt, "resume": resume_step})

    def write(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram | None] | None = None
    ) -> None:
        """Append one record. Values are numbers, also nan and infinities; anything with `__float__` will do."""
        line: dict[str, Any] = {"attempt": self._attempt, "step": step, "time": time.time()}
        line["metrics"] = {name: float(value) for name, value in metrics.items()}
        if found := {name: [each.low, each.high, each.counts] for name, each in (histograms or {}).items() if each}:
            line["histograms"] = found
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        data, self._before = self._before + json.dumps(line).encode() + b"\n", b""
        with explained(self._path):
            fault("metrics")
            while data:  # one call as a rule; a signal or a full disk may split it
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsReader:
    """Reads the metrics of a run as they grow.

    Args:
        names: of the metrics that are wanted, with or without the process that is added to those of replicas; none: all.
    """

    def __init__(self, run: Run, *names: str) -> None:
        self._run, self._names = run, names
        self._offsets: dict[Path, int] = {}
        self._resumes: dict[int, int] = {}
        self._highest: dict[int, int] = {}

    def poll(self) -> tuple[list[Record], bool]:
        """Return the valid records that have come since the last call, and whether some of earlier calls became void.

        A value may come again; `last_reports` tells which of them counts.
        """
        records: list[Record] = []
        outdated = False
        for path in sorted(self._run.metrics.glob("*.jsonl")):
            for line in self._new_lines(path):
                if "resume" in line:
                    outdated |= self._resume(line["attempt"], line["resume"])
                else:
                    metrics = _unique(path.stem, line["metrics"], self._names)
                    shapes = {} if self._names else _unique(path.stem, line.get("histograms", {}), ())
                    histograms = {name: Histogram(*shape) for name, shape in shapes.items()}
                    records.append(Record(path.stem, line["attempt"], line["step"], line["time"], metrics, histograms))
        valid = [record for record in records if record.step <= self._last_step(record.attempt)]
        for record in valid:
            self._highest[record.attempt] = max(record.step, self._highest.get(record.attempt, record.step))
        return [record for record in valid if record.metrics], outdated

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the whole lines since the last call, without half lines of killed writers and foreign lines."""
        with open_file(path) as file:
            file.seek(self._offsets.get(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offsets[path] = self._offsets.get(path, 0) + len(line)
                with suppress(ValueError):
                    if _is_line(value := parse_json(line)):
                        yield value

    def _resume(self, attempt: int, step: int) -> bool:
        self._resumes[attempt] = min(step, self._resumes.get(attempt, step))
        return any(earlier < attempt and highest > step for earlier, highest in self._highest.items())

    def _last_step(self, attempt: int) -> float:
        """Return the last step of an attempt that no later attempt made void."""
        return min((step for later, step in self._resumes.items() if later > attempt), default=math.inf)


def _is_line(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("attempt")) is not int:
        return False
    if "resume" in value:
        return type(value["resume"]) is int
    metrics = value.get("metrics")
    numbers = [value.get("time"), *metrics.values()] if isinstance(metrics, dict) else [None]
    histograms = value.get("histograms", {})
    if not isinstance(histograms, dict) or not all(map(_is_histogram, histograms.values())):
        return False
    return type(value.get("step")) is int and all(map(_is_number, numbers))


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_histogram(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 3 and isinstance(value[2], list) and value[2]):
        return False
    return all(map(_is_number, (*value[:2], *value[2])))


def _unique(process: str, metrics: dict[str, _Value], wanted: Sequence[str]) -> dict[str, _Value]:
    """Return metrics, of all those that are wanted, under names that are unique in the run."""
    own = "" if process in _ALONE or process.startswith(EVALUATION) else f"/{process}"
    # one text for a name in all steps: they would take more memory than the values
    return {
        sys.intern(name + own): value
        for name, value in metrics.items()
        if not wanted or name in wanted or name + own in wanted
    }


def last_reports(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records ordered by step, attempt and time, each value of a step only in the last record that has it."""
    ordered = sorted(records, key=lambda record: (record.step, record.attempt, record.time))
    for _, of_step in groupby(ordered, key=lambda record: record.step):
        group = list(of_step)
        last = {name: record for record in group for name in record.metrics}
        shaped = {name: record for record in group for name in record.histograms}
        for record in group:
            metrics = {name: value for name, value in record.metrics.items() if last[name] is record}
            histograms = {name: shape for name, shape in record.histograms.items() if shaped[name] is record}
            whole = len(metrics) + len(histograms) == len(record.metrics) + len(record.histograms)
            yield record if whole else replace(record, metrics=metrics, histograms=histograms)


def first_record(run: Run, process: str, name: str, valid: Callable[[Record], bool]) -> Record | None:
    """Return the first valid record of a process that has the metric `name`, without reading what follows it."""
    with suppress(FileNotFoundError), open_file(run.metrics_of(process)) as file:
        return next(_having(file, process, name, valid), None)
    return None


def last_records(run: Run, process: str, name: str, valid: Callable[[Record], bool], most: int = 1) -> list[Record]:
    """Return the last valid records of a process that have the metric `name`, the newest first, without reading what lies before them."""
    with suppress(FileNotFoundError), open_file(run.metrics_of(process)) as file:
        return list(islice(_having(lines_from_end(file), process, name, valid), most))
    return []


def _having(lines: Iterable[bytes], process: str, name: str, valid: Callable[[Record], bool]) -> Iterator[Record]:
    """Yield the valid records of these lines, those without a metric of this name left out unread."""
    wanted = json.dumps(name).encode()
    for line in lines:
        if wanted in line:
            with suppress(ValueError):
                value = parse_json(line)
                if _is_line(value) and name in value.get("metrics", ()):
                    record = Record(process, value["attempt"], value["step"], value["time"], value["metrics"])
                    if valid(record):
                        yield record


def lines_from_end(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first, without reading what lies before them."""
    end, ends = file.seek(0, os.SEEK_END), list[bytes]()
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        first, *lines = file.read(end - start).split(b"\n")
        end = start
        if lines:
            ends.append(lines.pop())
            yield b"".join(reversed(ends))
            yield from reversed(lines)
            ends = []
        ends.append(first)
    yield b"".join(reversed(ends))


def read_metrics(run: Run, *names: str) -> list[Record]:
    """Return all valid records, ordered by step, attempt and time; each value of a step is in one of them, the last that had it.

    Args:
        names: as of `MetricsReader`.
    """
    records, _ = MetricsReader(run, *names).poll()
    return list(last_reports(records))


def merged(run: Run, *names: str) -> dict[int, dict[str, float]]:
    """Return step to name to value over all processes, by step; `names` as of `MetricsReader`."""
    steps: dict[int, dict[str, float]] = {}
    for record in read_metrics(run, *names):
        steps.setdefault(record.step, {}).update(record.metrics)
    return steps


class Curve:
    """One metric by step; of what is there already each call reads only what it has gained."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name
        self._forget()

    def _forget(self) -> None:
        self._reader, self._values = MetricsReader(self._run, self._name), dict[int, float]()

    def values(self) -> Mapping[int, float]:
        records, outdated = self._reader.poll()
        if outdated:
            self._forget()
            records, _ = self._reader.poll()
        for record in last_reports(records):
            if self._name in record.metrics:
                self._values[record.step] = record.metrics[self._name]
        return self._values


def values_of(run: Run, name: str) -> Mapping[int, float]:
    """Return one metric by step."""
    return Curve(run, name).values()
