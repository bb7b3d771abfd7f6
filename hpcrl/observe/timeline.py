"""Records the timeline of every process of a run: one file of spans per process and attempt, without gaps.

    {"process": "rank-0", "host": "n1", "versions": {"torch": "2.13.0"}}          a writer starts
    {"start": 1763666666.5, "seconds": 2.25, "phase": "policy_train", "step": 3}  what it did from then on, for so long

A process is in one phase at a time, so spans of a process follow one another and the shares of a step add up to the whole. Steps are the
trainer's: from the moment at which it begins to wait for a batch to the moment at which it begins to wait for the next one.

    {"finished": 1763666700.25}                                                   a replica had last finished a group then

A file of `_LARGEST` bytes is added to <process>.old.jsonl, whose spans are made coarser until they take half as much. So the sums of an
attempt stay exact, however long it is, and the newest spans are the finest. The first ones, of its start and first step, stay as they are.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.observe.metrics import lines_from_end
from hpcrl.rundir.commit import make_directory, open_file, parse_json, write_text
from hpcrl.rundir.layout import Run, attempt_of
from hpcrl.rundir.records import is_time

IMPORT, LOAD, IDLE, OTHER, ABSENT = "import", "load", "idle", "other", "absent"
"""Phases of more than one role. A process is absent before its first span and after its last one."""
ENVIRONMENT = "environment"
"""Phase of a replica whose groups all wait for environments or rewards: its engine has no request."""
ASLEEP = "asleep"
"""Phase of a replica whose engine has no lease of the GPUs that it shares with a trainer rank."""

KINDS = {
    "generate": ("generate",),
    "wait": ("wait_for_generation_buffer", "wait_for_groups", "wait_for_critic", "wait_for_policy"),
    "train": (
        "load_rows", "fwd_logprobs_values_reward", "compute_advantages_and_returns", "critic_train", "policy_train",
        "update_ref_with_policy",
    ),
    "publish": ("sync_weights", "fetch_weights"),
    "colocation": (ASLEEP, "offload", "onload"),
    "pause": ("update_weights",),
    "checkpoint": ("save_checkpoints", "save_hf_model", "dump_data_batch"),
    "evaluate": ("eval", "evaluate"),
    "score": ("score",),
    "environment": ("environment",),
    IDLE: (IDLE,),
    LOAD: (IMPORT, LOAD),
    OTHER: (OTHER,),
    ABSENT: (ABSENT,),
}  # fmt: skip
"""By what people look for: the phases."""

_KIND_OF = {phase: kind for kind, phases in KINDS.items() for phase in phases}
_LARGEST = 4 << 20
_KEPT = 1 / 8  # of the lines that a shortened timeline has, for the start and the first step
_PACKAGES = ("torch", "transformers", "megatron.core", "peft", "numpy")
_WRITE_S, _GAP_S = 2.0, 1e-3
FIRST_RANK = "rank-0"
"""The process of the trainer that stands for all of its ranks."""


@dataclass(frozen=True)
class Span:
    """One phase of a process.

    Attributes:
        start, end: Unix time, at the clock of the node.
        step: that the process worked on; None where it works on none in particular.
    """

    process: str
    attempt: int
    phase: str
    start: float
    end: float
    step: int | None = None

    @property
    def kind(self) -> str:
        """Return which of KINDS the phase is of."""
        return _KIND_OF.get(self.phase, OTHER)


def process_start() -> float:
    """Return the Unix time at which this process was started, as Linux counts it (proc_pid_stat(5), starttime)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age)


class Timeline:
    """Notes what one process does; its only writer. A thread of the process may call while another does.

    What cannot be written is not worth an attempt: the first refusal is printed, and nothing is written any more.

    Args:
        resolution_s: phases are added up over at least this time before a span of each is written, in the order in which they began. So a
            process that changes between two phases a thousand times a second writes few lines, and the sums are exact.
        began: Unix time of the start of the process, which has imported its modules since then; None: it does not count.
    """

    def __init__(
        self, run: Run, process: str, attempt: int, resolution_s: float = 0.001, began: float | None = None
    ) -> None:
        self._path, self._resolution_s = run.timeline_of(attempt, process), resolution_s
        self._lock = threading.Lock()
        self._start, self._began = time.time(), time.monotonic()
        self._phase, self._since, self._step = LOAD, self._began, None
        self._seconds = dict[str, float]()
        self._follower: Callable[[str, int | None], None] | None = None
        self._lines: list[str] = []
        self._written, self._refused = self._began, False
        self._finished: float | None = None
        # one that was killed in the middle of a line shares its file with the one that took its place
        self._lines.append("\n" if self._path.exists() else "")
        self._note({"process": process, "host": socket.gethostname(), "versions": _versions()})
        if began is not None:
            seconds = max(0.0, self._start - began)
            self._note({"start": round(self._start - seconds, 6), "seconds": round(seconds, 6), "phase": IMPORT})

    def follow(self, follower: Callable[[str, int | None], None]) -> None:
        """Call `follower` with phase and step, now and whenever one of them changes, so that another tool shows the same ranges."""
        with self._lock:
            self._follower = follower
            follower(self._phase, self._step)

    def enter(self, phase: str) -> str:
        """Record that the process is in this phase from now on; return the phase before."""
        with self._lock:
            before = self._phase
            if phase != before:
                self._enter(phase)
            return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase as long as the `with` block lasts, and in the one before it afterwards."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin_step(self, step: int) -> None:
        """Record that the process works on this step from now on."""
        with self._lock:
            if step != self._step:
                self._enter(self._phase)
                self._end_window()
                self._step = step
                if self._follower:
                    self._follower(self._phase, step)

    def finish_group(self) -> None:
        """Record that work is finished now which outlives this process."""
        with self._lock:
            self._finished = self._start + time.monotonic() - self._began

    def close(self) -> None:
        """Write what there is; the process ends."""
        with self._lock:
            self._enter(self._phase)
            self._end_window()
            self._write()

    def _enter(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        if self._follower and phase != self._phase:
            self._follower(phase, self._step)
        self._phase, self._since = phase, now
        if now - self._began >= self._resolution_s:
            self._end_window()
        if now - self._written >= _WRITE_S:
            self._write()

    def _end_window(self) -> None:
        for phase, seconds in self._seconds.items():
            step = {} if self._step is None else {"step": self._step}
            self._note({"start": round(self._start, 6), "seconds": round(seconds, 6), "phase": phase, **step})
            self._start += seconds
        self._seconds.clear()
        self._began = self._since

    def _note(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps(line) + "\n")

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._finished is not None:
            self._note({"finished": round(self._finished, 6)})
            self._finished = None
        data = "".join(self._lines).encode()
        self._lines.clear()
        if self._refused or not data:
            return
        try:
            make_directory(self._path.parent)
            with self._path.open("ab", buffering=0) as file:
                file.write(data)
                size = file.tell()
            if size > _LARGEST:
                shorten(self._path)
        except OSError as error:
            self._refused = True
            print(f"{self._path} could not be written: {error.strerror}; the timeline ends here", flush=True)


def shorten(path: Path) -> None:
    """Add the spans of a timeline's file to those before them, in <process>.old.jsonl of at most half of `_LARGEST` bytes; remove the file.

    Where that is interrupted, both have the same spans.
    """
    old = path.with_suffix(".old.jsonl")
    lines = [line for file in (old, path) for line in _lines_of(file)]
    times = [span.start for line in lines if (span := span_of(line, "", 0))]
    fit = _LARGEST // 2 * len(lines) // max(1, sum(file.stat().st_size for file in (old, path) if file.exists()))
    whole = max(times, default=0.0) - min(times, default=0.0)
    resolution_s = 2 * whole / max(1, fit)
    kept, lines = lines[: int(_KEPT * fit)], lines[int(_KEPT * fit) :]
    while len(kept) + len(lines) > fit and 0 < resolution_s <= 2 * whole:
        lines, resolution_s = list(_coarser(lines, resolution_s)), 2 * resolution_s
    write_text(old, "".join(json.dumps(line) + "\n" for line in kept + lines))
    path.unlink()


def _coarser(lines: Iterable[dict[str, Any]], resolution_s: float) -> Iterator[dict[str, Any]]:
    """Yield the lines of a timeline with the spans of each phase added up over windows of this time; a gap ends a window."""
    window, finished, begin, end = dict[str, dict[str, Any]](), None, 0.0, 0.0

    def emptied() -> Iterator[dict[str, Any]]:
        at = begin
        for span in window.values():
            yield span | {"start": round(at, 6)}
            at += span["seconds"]
        window.clear()

    for line in lines:
        if "finished" in line:
            finished = line
        elif span_of(line, "", 0) is None:
            yield from emptied()
            if finished:
                yield finished
            finished = None
            yield line
        else:
            start = line["start"]
            if window and (start - begin >= resolution_s or start - end > _GAP_S):
                yield from emptied()
            begin = begin if window else start
            end = start + line["seconds"]
            before = window.get(line["phase"], {"seconds": 0.0})
            window[line["phase"]] = line | {"seconds": round(before["seconds"] + line["seconds"], 6)}
    yield from emptied()
    if finished:
        yield finished


def _versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that a run depends on and this process has imported."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    return {"python": platform.python_version()} | {name: str(found) for name, found in imported.items() if found}


def versions_of(run: Run) -> dict[str, str]:
    """Return the versions that the processes of the newest attempt with a timeline ran with; several where they differ."""
    attempts = sorted(number for path in run.timelines.glob("*") if (number := attempt_of(path)) is not None)
    found: dict[str, set[str]] = defaultdict(set)
    for path in run.timeline(attempts[-1]).glob("*.jsonl") if attempts else ():
        for line in _lines_of(path):
            if isinstance(versions := line.get("versions"), dict):
                for name, version in versions.items():
                    found[str(name)].add(str(version))
    return {name: ", ".join(sorted(versions)) for name, versions in sorted(found.items())}


def read_spans(run: Run, attempt: int | None = None) -> list[Span]:
    """Return the spans of all processes, of one attempt if it is given, ordered by process and time; foreign lines are skipped."""
    folders = [path for path in run.timelines.glob("*") if attempt_of(path) is not None] if attempt is None else []
    found = [
        span
        for folder in (folders if attempt is None else [run.timeline(attempt)])
        for path in folder.glob("*.jsonl")
        for span in _spans_of(path, attempt_of(folder) or 0)
    ]
    return sorted(found, key=lambda span: (span.process, span.start))


def _spans_of(path: Path, attempt: int) -> Iterator[Span]:
    process = path.name.removesuffix(".jsonl").removesuffix(".old")
    return filter(None, (span_of(line, process, attempt) for line in _lines_of(path)))


def process_lines(run: Run, attempt: int, process: str) -> Iterator[dict[str, Any]]:
    """Yield the lines that a process wrote in one attempt, in their order."""
    path = run.timeline_of(attempt, process)
    for file in (path.with_suffix(".old.jsonl"), path):
        yield from _lines_of(file)


def recent_spans(run: Run, attempt: int, process: str) -> Iterator[Span]:
    """Yield the spans of a process in one attempt, the newest first, without reading what lies before them."""
    path = run.timeline_of(attempt, process)
    for file_path in (path, path.with_suffix(".old.jsonl")):
        with suppress(FileNotFoundError), open_file(file_path) as file:
            for line in lines_from_end(file):
                with suppress(ValueError):
                    if isinstance(value := parse_json(line), dict) and (span := span_of(value, process, attempt)):
                        yield span


def span_of(line: dict[str, Any], process: str, attempt: int) -> Span | None:
    """Return the span of a line of a timeline; None: it has none."""
    start, seconds, phase, step = (line.get(name) for name in ("start", "seconds", "phase", "step"))
    if not (is_time(start) and is_time(seconds) and isinstance(phase, str)):
        return None
    return Span(process, attempt, phase, start, start + seconds, step if isinstance(step, int) else None)


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(FileNotFoundError), open_file(path) as file:  # renamed meanwhile: it is read under its new name
        for line in file:
            with suppress(ValueError):
                if isinstance(value := parse_json(line), dict):
                    yield value


def steps_of(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    """Return when each step began and ended, by the trainer's first rank; of a step that several attempts trained, as the last one did."""
    own = [span for span in spans if span.process == FIRST_RANK and span.step is not None]
    last = {span.step: span.attempt for span in sorted(own, key=lambda span: span.attempt)}
    found: dict[int, tuple[float, float]] = {}
    for span in own:
        if span.step is not None and span.attempt == last[span.step]:
            start, end = found.get(span.step, (span.start, span.end))
            found[span.step] = min(start, span.start), max(end, span.end)
    return dict(sorted(found.items()))


def shares(spans: Iterable[Span], start: float, end: float) -> dict[str, dict[str, float]]:
    """Return by process what share of the time from `start` to `end`, in Unix time, it spent in each phase; they add up to 1 each.

    A process that had not begun, or had ended, was absent. Shares below a thousandth are left out: clocks are no better.
    """
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        within = min(span.end, end) - max(span.start, start)
        if within > 0:
            found[span.process][span.phase] += within / (end - start)
    for of_process in found.values():
        if (absent := 1.0 - sum(of_process.values())) > 1e-3:
            of_process[ABSENT] = absent
    return {process: _whole(of_process) for process, of_process in sorted(found.items())}


def _whole(parts: dict[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {phase: share / total for phase, share in parts.items()}
