"""Divides the time from an allocation to the end of the attempt's first step, as the first rank of the trainer spends it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hpcrl.observe.node_seconds import IMPORTS, JOBS, MODELS, STARTING, WAITED, Held, node_seconds
from hpcrl.observe.timeline import FIRST_RANK, Span, read_spans
from hpcrl.rundir.allocations import Allocation, read_allocations
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, read_attempts

AGENTS, CHECKS = "job and agent", "checks"
"""Before the attempt is opened, and from then until the first rank begins."""
_IN_ORDER = (AGENTS, CHECKS, IMPORTS, MODELS)


@dataclass(frozen=True)
class FirstStep:
    """First step of an attempt.

    Attributes:
        step: its number.
        parts: seconds from the allocation to its end, by what they were used for; first those of the start, in their order.
    """

    run: str
    attempt: int
    step: int
    parts: dict[str, float]

    def __str__(self) -> str:
        """Return the seconds, and of what they consist, in one line."""
        parts = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.parts.items() if seconds >= 0.05)
        return f"attempt {self.attempt}, {sum(self.parts.values()):.1f} s until step {self.step} is trained: {parts}"


def first_steps(run: Run) -> list[FirstStep]:
    """Return the first step of each attempt that has trained one. Raises RunError where a record of the run is damaged."""
    allocations = {one.job: one for one in read_allocations(run) if not one.pool}
    found = (
        _first_step(run, attempt, allocations[attempt.job])
        for attempt in read_attempts(run)
        if attempt.job in allocations
    )
    return [each for each in found if each is not None]


def _first_step(run: Run, attempt: Attempt, allocation: Allocation) -> FirstStep | None:
    spans = defaultdict[str, list[Span]](list)
    for span in read_spans(run, attempt.number):
        spans[span.process].append(span)
    trained = [span for span in spans[FIRST_RANK] if span.kind == "train" and span.step is not None]
    if not trained:
        return None
    step = trained[0].step or 0
    end = max(span.end for span in trained if span.step == step)
    held = Held(
        attempt.number, "trainer", allocation.start, max(allocation.start, end), [[FIRST_RANK]], (STARTING, JOBS)
    )
    uses = node_seconds([held], spans, {}, {})[attempt.number, held.role]
    parts = dict[str, float]()
    for (category, what), seconds in uses.items():
        name = what if category == STARTING else f"{category} for {what}" if category == WAITED else category
        parts[name] = parts.get(name, 0.0) + seconds
    before = parts.pop(JOBS, 0.0)
    parts[AGENTS] = min(before, max(0.0, attempt.started - allocation.start))
    parts[CHECKS] = before - parts[AGENTS]
    order = [*_IN_ORDER, *sorted(parts.keys() - {*_IN_ORDER}, key=lambda name: (-parts[name], name))]
    return FirstStep(f"{run.project}/{run.name}", attempt.number, step, {name: parts.get(name, 0.0) for name in order})
