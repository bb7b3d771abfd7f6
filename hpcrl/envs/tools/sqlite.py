"""Queries of strangers against SQLite files: they read, for a bounded time, and nothing else."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.envs.tools import sqlite_query
from hpcrl.errors import DataError

_START_S = 60.0
_COMMAND = [sys.executable, "-I", "-S", "-B", "-X", "utf8", sqlite_query.__file__]


class QueryError(Exception):
    """A query failed; the message is for its author."""


@dataclass(frozen=True)
class Table:
    """What a query found.

    Attributes:
        columns: their names.
        rows: at most as many as were asked for.
        more: whether there are further rows.
    """

    columns: Sequence[str]
    rows: list[tuple[Any, ...]]
    more: bool

    def text(self, most_characters: int) -> str:
        """Return the table as CSV; NULL stands for no value. A cut at the end is marked."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow("NULL" if value is None else str(value)[:most_characters] for value in row)
            if out.tell() > most_characters:
                return f"{out.getvalue()[:most_characters]}… (cut)"
        return out.getvalue() + (f"… (only the first {len(self.rows)} rows)" if self.more else "")


def database_file(folder: str, name: str) -> Path:
    """Return the file of that name, which must lie inside the folder, links followed. Raises DataError where it does not, or is not there."""
    root = Path(folder).resolve()
    try:
        path = (root / name).resolve()
        if path.is_relative_to(root) and path.is_file():
            return path
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, a loop of links
        raise DataError(f"{name!r:.200} is no file of {root}: {error}") from error
    where = "is missing" if path.is_relative_to(root) else "lies outside"
    raise DataError(f"database {name!r:.200}: expected a file in {root}, but {path} {where}")


def query(path: Path, sql: str, most_rows: int, seconds: float) -> Table:
    """Return what one statement finds in the database, in a process that is killed when it takes too long.

    Args:
        seconds: wall time, without the start of the process.

    Raises:
        QueryError: it is wrong, does more than read, or takes too much time or memory; or the file is no database.
        OSError: no process can be started.
        subprocess.TimeoutExpired: none has started after a minute.
    """
    request = {
        "uri": f"{path.as_uri()}?mode=ro",
        "sql": sql,
        "rows": most_rows + 1,
        "seconds": seconds,
    }
    given = json.dumps(request).encode()
    done = subprocess.run(_COMMAND, input=given, capture_output=True, timeout=seconds + _START_S, check=False)
    if done.returncode == -signal.SIGALRM:
        raise QueryError(f"it took more than {seconds:g} s")
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        how = done.stderr.decode(errors="replace")[-500:] or f"status {done.returncode}"
        raise QueryError(f"SQLite's process failed: {how}") from error
    if "error" in answer:
        raise QueryError(answer["error"])
    rows = [tuple(bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in row) for row in answer["rows"]]
    return Table(answer["columns"], rows[:most_rows], len(rows) > most_rows)
