"""Writes the page of a report: one HTML file with its styles, its program, its charts (uPlot) and its data in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("uplot.min.js", "elements.js", "charts.js", "heatmap.js", "timeline.js", "samples.js", "main.js", "live.js")
_STYLES = ("uplot.min.css", "report.css")
_OF_PROJECT = ("elements.js", "project.js")


def page(runs: Sequence[dict[str, Any]], live: bool = False) -> str:
    """Return the HTML of a report.

    Args:
        runs: as of `content_of`.
        live: the page asks the server that it came from for newer content.
    """
    return _filled(", ".join(run["name"] for run in runs), _SCRIPTS, {"runs": runs, "live": live})


def project_page(content: dict[str, Any]) -> str:
    """Return the HTML of a project's page.

    Args:
        content: as of `project_of`.
    """
    return _filled(content["title"], _OF_PROJECT, {"runs": [], **content})


def _filled(title: str, scripts: Sequence[str], data: dict[str, Any]) -> str:
    texts = {
        "TITLE": _escaped(title),
        "LICENSE": (_FOLDER / "uplot.LICENSE").read_text(encoding="utf-8").strip(),
        "STYLES": styles(),
        "SCRIPTS": "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in scripts),
        "DATA": as_data(data),
    }
    parts = (_FOLDER / "report.html").read_text(encoding="utf-8").split("@@")
    return "".join(texts[part] if at % 2 else part for at, part in enumerate(parts))


def styles() -> str:
    """Return the style sheets of a report."""
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _STYLES)


def as_data(value: Any) -> str:
    """Return JSON that stays data within a script element, whatever a policy or a dataset wrote."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
