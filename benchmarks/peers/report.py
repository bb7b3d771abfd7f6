"""What one run of a tool took, as a line of JSON, and all of them as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median

HEADER = (
    "| tool | runs | whole command, s | processor, s | first step, s | s/step | tokens/s | peaks of memory, MiB | memory together, MiB | result |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Record:
    """One run of one tool.

    Attributes:
        tool: with its engine, where it has one.
        command: what was run.
        date, commit, machine: when, of hpcrl (+: with changes) and where.
        load: processes that wanted a processor in the minute before.
        error: the end of what it printed, where it failed; the numbers are then of no run.
        wall_s, cpu_s: of the whole command: seconds, and those of all processors together.
        peak_mib: sum of the peaks of resident memory of its processes.
        together_mib: most that they had at the same time, with each page counted once.
        step_s, tokens: of each of hpcrl's steps: seconds, and tokens with prompts.
        scores: greedy scores of the first and the last policy.
        losses, grad_norms: of each optimizer step, where both tools train the same samples.
    """

    work: str
    tool: str
    command: str
    date: str
    commit: str
    machine: str
    load: float
    error: str | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mib: float = 0.0
    together_mib: float = 0.0
    step_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    @property
    def later_step_s(self) -> float:
        """Median of the steps after the first, which warms up, where there are any."""
        return median(self.step_s[1:] or self.step_s)

    @property
    def tokens_per_s(self) -> float:
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.step_s, strict=True)]
        return median(rates[1:] or rates)


_FIGURES: tuple[tuple[Callable[[Record], float], str, bool], ...] = (
    (lambda one: one.wall_s, ".1f", False),
    (lambda one: one.cpu_s, ".1f", False),
    (lambda one: one.step_s[0], ".2f", False),
    (lambda one: one.later_step_s, ".2f", False),
    (lambda one: one.tokens_per_s, ".0f", True),
    (lambda one: one.peak_mib, ".0f", False),
    (lambda one: one.together_mib, ".0f", False),
)
"""A column of the table: value, format, and whether more of it is better."""


def table(records: Sequence[Record]) -> str:
    """Return a row per tool, medians over its runs; then each of hpcrl's against each of TRL's."""
    runs = {tool: [one for one in records if one.tool == tool] for tool in dict.fromkeys(one.tool for one in records)}
    done = {tool: [one for one in own if one.error is None] for tool, own in runs.items()}
    middle = {tool: [median(map(value, own)) for value, _, _ in _FIGURES] for tool, own in done.items() if own}
    rows = [HEADER]
    for tool, own in runs.items():
        if tool in middle:
            figures = [format(value, form) for value, (_, form, _) in zip(middle[tool], _FIGURES, strict=True)]
            rows.append(_row(tool, len(done[tool]), figures, _result(done[tool])))
        else:
            rows.append(_row(tool, 0, ["-"] * len(_FIGURES), f"failed: {own[0].error}".replace("|", "/")))
    for own, other in product(middle, middle):
        if own.startswith("hpcrl") and other.startswith("TRL"):
            rows.append(_row(f"{own} / {other}", "", _against(middle[own], middle[other]), ""))
    return "\n".join(rows)


def largest_difference(records: Sequence[Record]) -> str:
    """Return how far apart the tools' losses and gradient norms are, where they train the same samples."""
    first = {one.tool: one for one in reversed(records) if one.losses}
    own = next((one for tool, one in first.items() if tool.startswith("hpcrl")), None)
    return "\n".join(_apart(own, one) for one in first.values() if own and one is not own)


def _apart(own: Record, other: Record) -> str:
    losses = max(abs(a - b) for a, b in zip(own.losses, other.losses, strict=True))
    norms = max(abs(a - b) / b for a, b in zip(own.grad_norms, other.grad_norms, strict=True))
    return f"{own.tool} and {other.tool}: largest difference between losses of an optimizer step: {losses:.1e}; between gradient norms: {norms:.1e} of one"


def _against(own: list[float], other: list[float]) -> list[str]:
    """Return each figure as a multiple of the other's, with a word where that is worse."""
    found = []
    for value, reference, (_, _, more_is_better) in zip(own, other, _FIGURES, strict=True):
        worse = value < reference if more_is_better else value > reference
        found.append(f"{value / reference:.2f}" + (" (worse)" if worse else ""))
    return found


def _result(runs: Sequence[Record]) -> str:
    if runs[0].scores:
        first, last = (median(one.scores[at] for one in runs) for at in (0, -1))
        return f"score {first:.3f} → {last:.3f}"
    return f"loss {runs[0].losses[-1]:.7f}" if runs[0].losses else ""


def _row(tool: str, runs: int | str, figures: list[str], result: str) -> str:
    return f"| {' | '.join([tool, str(runs), *figures, result])} |"
