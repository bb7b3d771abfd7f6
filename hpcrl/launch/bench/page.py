"""Writes the report of a bench as one HTML file, and compares two reports."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpcrl.errors import DataError
from hpcrl.launch.bench.figures import PARTS_OF_PAGE
from hpcrl.observe.report.page import styles
from hpcrl.rundir.commit import parse_json

_TITLES = {
    "correct": "Correct",
    "fast": "Fast",
    "survives": "Survives",
    "plan": "Plan",
}
_CLASSES = {"ok": "good", "look": "bad", "first seen": "faint", "not measured": "faint"}
_HEADS = ("", "figure", "value", "usual", "measured by", "what to do")
_TEXTS = ("part", "key", "title", "unit", "better")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{styles}
</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
{sections}
</main>
</body>
</html>
"""


def bench_page(report: Mapping[str, Any]) -> str:
    """Return the HTML of a report, as `bench_report` returns it."""
    sections = [_about(report)]
    for part in PARTS_OF_PAGE:
        rows = "\n".join(_row(figure) for figure in report["figures"] if figure["part"] == part)
        heads = "".join(f"<th>{head}</th>" for head in _HEADS)
        table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n{rows}\n</table></div>'
        sections.append(f"<section><h2>{_TITLES[part]}</h2>{table}</section>")
    return _PAGE.format(title=_text(f"bench {report['name']}"), styles=styles(), sections="\n".join(sections))


def _about(report: Mapping[str, Any]) -> str:
    facts = {
        "device": report["device"],
        "nodes": ", ".join(report["hosts"]) or "not known",
        "model": report["model"],
        "engine": report["engine"],
        "longest response": f"{report['longest']} tokens",
        "run": report["run"],
        "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(report["made"])),
        **report["versions"],
    }
    items = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())
    return f'<section><dl class="facts">{items}</dl></section>'


def _row(figure: Mapping[str, Any]) -> str:
    level, usual = figure["level"], figure["usual"]
    source = f"{usual}<br><span class=faint>{_text(figure['usual_source'])}</span>" if usual else ""
    cells = [
        _text(figure["title"]),
        f"{_text(shown(figure))}<br><span class=faint>{_text(figure['note'])}</span>",
        source,
        _text(figure["source"]),
        _text(figure["remedy"]),
    ]
    head = f'<th scope="row"><span class="{_CLASSES[level]}">{level}</span></th>'
    return f"<tr>{head}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _text(value: object) -> str:
    return html.escape(str(value))


def shown(figure: Mapping[str, Any]) -> str:
    """Return the value of a figure with its unit, for people."""
    value = figure["value"]
    return "-" if value is None else f"{value:,.4g} {figure['unit']}".rstrip()


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each figure, and for what is out of line the usual value and what to do."""
    for figure in report["figures"]:
        yield f"{figure['part']:9} {figure['level']:12} {figure['title']}: {shown(figure)}"
        if figure["level"] == "look":
            yield f"{'':22} usual: {figure['usual']} ({figure['usual_source']})"
            yield f"{'':22} -> {figure['remedy']}"


@dataclass(frozen=True)
class FigureChange:
    """A figure of two benches.

    Attributes:
        worse: by which share it is worse in the second one; negative: better.
    """

    title: str
    before: str
    after: str
    worse: float


def medians(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest of several reports, with the median of each of its figures over all that have it."""
    values = dict[str, list[float]]()
    for report in reports:
        for figure in report["figures"]:
            if figure["value"] is not None:
                values.setdefault(figure["key"], []).append(figure["value"])
    figures = [
        {**figure, "value": median(values[figure["key"]]) if figure["key"] in values else None}
        for figure in reports[-1]["figures"]
    ]
    return {**reports[-1], "figures": figures}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FigureChange]:
    """Return the figures that both reports have, and for which it is known what is better, the worst change first."""
    earlier = {figure["key"]: figure for figure in before["figures"]}
    found = []
    for figure in after["figures"]:
        old = earlier.get(figure["key"])
        if old is None or None in (old["value"], figure["value"]) or not figure["better"]:
            continue
        change = _worse(old["value"], figure["value"], figure["better"])
        found.append(FigureChange(figure["title"], shown(old), shown(figure), change))
    return sorted(found, key=lambda one: -one.worse)


def _worse(before: float, after: float, better: str) -> float:
    if better == "higher":
        return (before - after) / before if before else 0.0
    if before:
        return (after - before) / before
    return math.inf if after else 0.0


def parse_report(text: bytes, path: Path) -> dict[str, Any]:
    """Return the report of a JSON file that `hpcrl bench` wrote. Raises DataError where it is none."""
    try:
        value = parse_json(text)
        texts = [figure[name] for figure in value["figures"] for name in _TEXTS]
        if all(isinstance(text, str) for text in texts) and all(
            _is_value(figure["value"]) for figure in value["figures"]
        ):
            return value
    except (ValueError, KeyError, TypeError, OverflowError):
        pass
    raise DataError(f"{path} is no report of hpcrl bench; expected the JSON file that it writes")


def _is_value(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))
