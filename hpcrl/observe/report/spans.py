"""Reduces the timelines of a run for a report: few enough spans to draw, with the same sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from hpcrl.observe.timeline import ABSENT, KINDS, Span, read_spans, steps_of
from hpcrl.rundir.layout import Run

_MOST_SPANS = 240_000  # of all processes together: about 2 MB
_NAMES = list(KINDS)


def timeline_of(run: Run, started: float) -> dict[str, Any] | None:
    """Return the timeline of each process; None for a run without timelines.

    A process with too many spans has coarser ones: within windows of `resolution` seconds those of one kind are put together.

    Args:
        started: Unix time from which is counted.

    Returns:
        kinds: names. processes: by name, `spans` as kind and milliseconds in turns, from `start` milliseconds on, without gaps. Each has
        its `resolution` in seconds. steps: number, and milliseconds at which it began and ended.
    """
    spans = read_spans(run)
    if not spans:
        return None
    by_process: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_process[span.process].append(span)
    most = _MOST_SPANS // len(by_process)
    times = [[step, _ms(start - started), _ms(end - started)] for step, (start, end) in steps_of(spans).items()]
    processes = {}
    for process in sorted(by_process, key=_order):
        own, resolution = list(_runs(by_process[process], 0.0)), 0.0
        while len(own) > most:
            resolution = 2 * resolution or 0.01
            own = list(_runs(by_process[process], resolution))
        start = by_process[process][0].start
        processes[process] = {
            "start": _ms(start - started),
            "spans": [number for kind, end in _relative(own, start) for number in (kind, end)],
            "resolution": resolution,
        }
    return {"kinds": _NAMES, "processes": processes, "steps": times}


def _order(process: str) -> tuple[int, str, int]:
    """Return a sort key with trainer ranks first, then replicas and the others, and 10 after 9."""
    role, _, number = process.rpartition("-")
    roles = ("rank", "rollout", "scorer", "reward")
    return roles.index(role) if role in roles else len(roles), role, int(number) if number.isdecimal() else 0


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def _relative(parts: Sequence[tuple[str, float]], start: float) -> Iterator[tuple[int, int]]:
    """Yield kind and milliseconds of parts of which the ends are given; rounded so that the sums stay right."""
    before = 0
    for kind, end in parts:
        at = _ms(end - start)
        yield _NAMES.index(kind), at - before
        before = at


def _runs(spans: Sequence[Span], resolution: float) -> Iterator[tuple[str, float]]:
    """Yield kind and end of what follows without a gap: neighbours of one kind together, and within a window all of one kind."""
    begin = end = spans[0].start
    window: dict[str, float] = {}
    last: tuple[str, float] | None = None

    def emptied() -> Iterator[tuple[str, float]]:
        nonlocal begin
        for kind, seconds in window.items():
            begin += seconds
            yield kind, begin
        window.clear()

    for span in spans:
        for kind, until in ((ABSENT, span.start), (span.kind, span.end)):
            if until - end <= 0.0:
                continue
            window[kind] = window.get(kind, 0.0) + until - end
            end = until
            if end - begin >= resolution:
                for part in emptied():
                    if last and last[0] != part[0]:
                        yield last
                    last = part
    for part in emptied():
        if last and last[0] != part[0]:
            yield last
        last = part
    if last:
        yield last
