"""Writes TensorBoard's texts of a run, as Markdown: its configuration, attempts, summary, samples of its evaluations; and their
pictures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import tomli
import tomli_w

from hpcrl.config import Config
from hpcrl.config.secrets import masked
from hpcrl.errors import ConfigError
from hpcrl.observe.summary import summarise
from hpcrl.observe.summary_table import summary_rows
from hpcrl.rundir.commit import parse_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts, read_outcomes
from hpcrl.rundir.starts import read_starts, resumed_after
from hpcrl.text import markdown_cell, one_line, printable

_SAMPLES = 4
_PICTURES = 2  # of a sample: the file of events has them for each evaluation
_MOST_LETTERS = 1500
_MOST_BYTES = 1 << 22
"""Of a file of evaluated samples that are looked at: to look for the first rows in gigabytes would take longer than a step."""


def configuration(run: Run) -> str:
    """Return the settings without their defaults; all of them where a class of the user's own is missing here."""
    try:
        tree = Config.from_toml([run.config]).changed()
    except ConfigError:
        try:
            tree = tomli.loads(run.config.read_text(encoding="utf-8"))
        except ValueError as error:
            return _verbatim(f"{run.config} is damaged: {error}")
    return _verbatim(tomli_w.dumps(masked(tree)))


def summary(run: Run) -> str:
    """Return the summary of the run."""
    rows = "\n".join(f"| {name} | {markdown_cell(value)} |" for name, value in summary_rows(summarise(run)))
    return f"**{markdown_cell(run.project)}/{markdown_cell(run.name)}**\n\n| | |\n|---|---|\n{rows}\n\n`{one_line(str(run.path))}`"


def attempts(run: Run) -> str:
    """Return when each attempt began, after which step, and how it ended."""
    outcomes = {outcome.attempt: outcome for outcome in read_outcomes(run)}
    resumed = resumed_after(read_starts(run))
    lines = ["| attempt | began | after step | ended |", "|---|---|---|---|"]
    for attempt in read_attempts(run):
        outcome = outcomes.get(attempt.number)
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started))
        ended = f"{outcome.kind}: {outcome.message}" if outcome else ""
        lines.append(f"| {attempt.number} | {began} | {resumed.get(attempt.number, '')} | {markdown_cell(ended)} |")
    return "\n".join(lines)


def evaluated(run: Run, version: int) -> str:
    """Return some samples of an evaluation, of the same rows each time: prompt, response and score; empty where none were kept."""
    found = sorted(_first_rows(run, version), key=lambda row: (row["group_id"], row["sample"]))
    return "\n\n".join(map(_sample, found[:_SAMPLES]))


def pictures(run: Run, version: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and PNG files of pictures of the samples that `evaluated` shows, as far as they are kept."""
    for row in range(_SAMPLES):
        for number, path in enumerate(run.pictures_of(f"{_group(version, row)}.0")[:_PICTURES]):
            with suppress(OSError):  # removed meanwhile
                yield f"row {row}/{number}", path.read_bytes()


def _group(version: int, row: int) -> str:
    return f"e{version:06d}-{row:08d}"


def _first_rows(run: Run, version: int) -> Iterator[Any]:
    wanted = [f'"{_group(version, row)}"'.encode() for row in range(_SAMPLES)]
    for path in sorted(run.evals_of(version).glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file.readlines(_MOST_BYTES):
                if any(name in line for name in wanted) and (row := _whole(line)):
                    yield row


def _whole(line: bytes) -> Any | None:
    try:
        row = parse_json(line)
    except ValueError:  # of a worker that was killed
        return None
    names = ("prompt", "response", "score", "stop_reason", "group_id", "sample")
    return row if isinstance(row, dict) and all(name in row for name in names) and row["sample"] == 0 else None


def _sample(row: Any) -> str:
    messages = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "prompt", "content": row["prompt"]}]
    prompt = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
    title = f"**row {int(row['group_id'].rpartition('-')[2])}: reward {row['score']:g}**, {markdown_cell(str(row['stop_reason']))}"
    return f"{title}\n\n{_verbatim(_cut(prompt))}\n\nresponse\n\n{_verbatim(_cut(str(row['response'])))}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} … ({len(text)} characters)"


def _verbatim(text: str) -> str:
    """Return text as an indented block, out of which nothing in it can break."""
    return "\n".join(f"    {line}" for line in printable(text).split("\n"))
