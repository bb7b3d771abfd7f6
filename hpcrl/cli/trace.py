"""`hpcrl trace`: write the timeline of a run's processes, for Perfetto and chrome://tracing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.cli._common import add_run, named_run
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.observe.timeline import Span

_STEPS = re.compile(r"(\d*):(\d*)|(\d+)", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--steps", type=_steps, default=(None, None), metavar="A:B", help="from A to B (default: all)")
    parser.add_argument("-o", "--output", type=Path, help="file that is written (RUN-trace.json)")
    parser.set_defaults(action=_trace)


def _steps(text: str) -> tuple[int | None, int | None]:
    found = _STEPS.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(f"expected steps as 3:7, 3:, :7 or 3, found {text!r}")
    first, last = (int(part) if part else None for part in ((found[3], found[3]) if found[3] else found.group(1, 2)))
    if first is not None and last is not None and last < first:
        raise argparse.ArgumentTypeError(f"expected the first step before the last one, found {text!r}")
    return first, last


def _trace(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.errors import RunError
    from hpcrl.observe.timeline import read_spans, shares, steps_of
    from hpcrl.rundir.commit import write_text

    run, (first, last) = named_run(arguments), arguments.steps
    spans = read_spans(run)
    steps = steps_of(spans)
    if not spans:
        raise RunError(f"{run.name} has no timeline: no process of it has begun, or it was made by an earlier hpcrl")
    chosen = [step for step in steps if (first or 0) <= step and (last is None or step <= last)]
    if not chosen and (first, last) != (None, None):
        there = f"steps {min(steps)} to {max(steps)}" if steps else "none"
        raise RunError(f"the timeline of {run.name} has no step that --steps names; there are {there}")
    whole = (min(span.start for span in spans), max(span.end for span in spans))
    start = steps[chosen[0]][0] if first is not None else whole[0]
    end = steps[chosen[-1]][1] if last is not None else whole[1]
    events = trace_events([span for span in spans if span.end > start and span.start < end], steps)
    path = arguments.output or Path(f"{run.name}-trace.json")
    write_text(path, dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    for process, parts in shares(spans, start, end).items():
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        print(one_line(f"{process:12} " + "  ".join(f"{phase} {share:.1%}" for phase, share in ordered)))
    print(
        f"{len(events)} events of {end - start:.1f} s in {path}: open it in https://ui.perfetto.dev or chrome://tracing"
    )
    return 0


def trace_events(spans: Sequence[Span], steps: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """Return complete events of the Trace Event Format, a process of it for each of the run's, and one for the steps; times in microseconds."""
    processes = {name: number for number, name in enumerate(sorted({span.process for span in spans}), 1)}
    begin = min(span.start for span in spans)
    bounds = begin, max(span.end for span in spans)

    def event(name: str, process: int, start: float, end: float, **arguments: Any) -> dict[str, Any]:
        at, lasted = round(1e6 * (start - begin), 1), round(1e6 * (end - start), 1)
        return {"ph": "X", "name": name, "pid": process, "tid": 0, "ts": at, "dur": lasted, "args": arguments}

    events = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        for name, number in {"steps": 0, **processes}.items()
    ]
    for step, (start, end) in steps.items():
        if end > bounds[0] and start < bounds[1]:
            events.append(event(f"step {step}", 0, max(start, bounds[0]), min(end, bounds[1])))
    for span in spans:
        step = {} if span.step is None else {"step": span.step}
        found = event(span.phase, processes[span.process], span.start, span.end, attempt=span.attempt, **step)
        events.append(found | {"cat": span.kind})
    return events
