"""Formats the results of `hpcrl eval`: a table for the terminal, and report.md beside results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.observe.scores import Z95
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.text import markdown_cell, one_line

_SCORE, _PASS, _TOKENS = "avg_score", "pass_at_", "generate/avg_num_tokens"
_MOST_FAILURES = 20
_NONE = "-"  # all samples failed, or too many for pass@k


def write_results(directory: Run, results: Mapping[str, Any]) -> None:
    """Write results.json and report.md of an evaluation."""
    write_json(directory.path / "results.json", results)
    write_text(directory.path / "report.md", report(results))


def summary(results: Mapping[str, Any]) -> list[str]:
    """Return a line of what was evaluated, and a table with a line per data source and one for all where there are several."""
    heads, rows = _scores(results)
    lines = [_headline(results), *aligned(heads, rows)]
    if results["failures"]:
        lines.append(f"{len(results['failures'])} samples failed, the first: {results['failures'][0]}")
    return [one_line(line) for line in lines]


def report(results: Mapping[str, Any]) -> str:
    """Return an evaluation as Markdown."""
    reasons = sorted({reason for counts in results["stop_reasons"].values() for reason in counts})
    ends = [
        [source, *(_share(results["stop_reasons"][source], reason) for reason in reasons)]
        for source in _sources(results["prompts"])
    ]
    asked = {"model": results["model"], "version": results["version"], "seed": results["seed"]}
    asked |= {f"data {number}": path for number, path in enumerate(results["data"], 1)}
    asked |= {name: value for name, value in results["sampling"].items() if value not in (None, [], {})}
    parts = [
        f"# {_headline(results)}",
        "Means over the prompts ± half of their 95 % confidence interval: 1.96 standard errors, those of the means of prompts "
        "(arXiv:2411.00640). pass@k is the unbiased estimate (arXiv:2107.03374). "
        f"A sample is solved by {results['solved']}. Samples that failed have no score: they are left out.",
        _markdown(*_scores(results)),
        "## How samples ended",
        _markdown(["source", *reasons], ends),
        "## What was asked for",
        _markdown(["setting", "value"], [[name, str(value)] for name, value in asked.items()]),
    ]
    if results.get("rescored_from"):
        parts.insert(1, f"Scores of the samples of {results['rescored_from']}; nothing was generated.")
    if failures := results["failures"]:
        shown = [f"- {markdown_cell(failure)}" for failure in failures[:_MOST_FAILURES]]
        parts += [f"## {len(failures)} samples failed", "\n".join(shown)]
    return "\n\n".join(parts) + "\n"


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (f"{cell:{'>' if at else '<'}{widths[at]}}" for at, cell in enumerate(cells))
        return "  ".join([first, *others]).rstrip()

    return [line(heads), *map(line, rows)]


def with_interval(value: float, error: float | None) -> str:
    """Return a mean with half of its 95 % confidence interval, which equal prompts do not give."""
    return f"{value:.4g} ±{Z95 * error:.2g}" if error else f"{value:.4g}"


def _headline(results: Mapping[str, Any]) -> str:
    n, too_long = results["n_samples"], results["too_long"]
    dropped = f", {too_long} were longer than trainer.max_prompt_length" if too_long else ""
    return (
        f"{results['subject']}: {results['prompts']['all']} prompts, {n} sample{'s' if n > 1 else ''} each, "
        f"{results['seconds']:.0f} s{dropped}"
    )


def _sources(prompts: Mapping[str, int]) -> list[str]:
    sources = [name for name in prompts if name != "all"]
    return [*sources, "all"] if len(sources) > 1 else sources


def _scores(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    prompts, metrics, errors = results["prompts"], results["metrics"], results["errors"]
    passes = [name.removeprefix("eval/all/") for name in metrics if name.startswith(f"eval/all/{_PASS}")]
    rows = [
        [
            source,
            str(prompts[source]),
            *(
                with_interval(metrics[name], errors.get(name)) if name in metrics else _NONE
                for name in (f"eval/{source}/{own}" for own in (_SCORE, *passes))
            ),
            f"{metrics[f'eval/{source}/{_TOKENS}']:.4g}",
        ]
        for source in _sources(prompts)
    ]  # fmt: skip
    heads = (column_of(name, results["solved"]) for name in (_SCORE, *passes))
    return ["source", "prompts", *heads, "tokens"], rows


def column_of(metric: str, solved: str) -> str:
    """Return how a metric of an evaluation is called above its column.

    Args:
        solved: as of hpcrl.observe.scores.solved_by.
    """
    return (
        f"{metric.replace(_PASS, 'pass@')} ({solved})" if metric.startswith(_PASS) else metric.replace(_SCORE, "score")
    )


def _share(counts: Mapping[str, int], reason: str) -> str:
    return f"{counts.get(reason, 0) / sum(counts.values()):.1%}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(markdown_cell(cell) for cell in line) + " |" for line in lines)
