"""Queries of strangers against SQLite files: they read, for a bounded time, and nothing else."""

from __future__ import annotations

import csv
import io
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError

_INSTRUCTIONS = 10_000  # of SQLite's machine, between two looks at the clock: about a millisecond
_LONGEST_VALUE = 2**20  # bytes; zeroblob() and printf() would make a gigabyte within one instruction
_MOST_COLUMNS = 500
BOUNDS_MEMORY = sys.version_info >= (3, 11)
"""Whether this Python can set the two limits above."""
_MOST_BYTES = 64 * 2**20  # of all rows
_READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_TELLING = ("table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list")
_FORBIDDEN_FUNCTIONS = ("load_extension", "fts3_tokenizer")


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
    """Return the file of that name, which must lie inside the folder, links followed.

    Raises:
        DataError: it does not, or is not there.
    """
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
    """Return what one statement finds in the database.

    Raises:
        QueryError: it is wrong, does more than read, or takes too long; or the file is no database.
    """
    late, deadline = False, time.monotonic() + seconds

    def look_at_the_clock() -> bool:
        nonlocal late
        late = time.monotonic() > deadline
        return late

    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
            connection.text_factory = lambda text: text.decode(errors="replace")
            if sys.version_info >= (3, 11):
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
                connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, _MOST_COLUMNS)
            connection.set_authorizer(_allowed)
            connection.set_progress_handler(look_at_the_clock, _INSTRUCTIONS)
            cursor = connection.execute(sql)
            rows = _fetched(cursor, most_rows + 1)
            columns = [column[0] for column in cursor.description or ()]
    except (
        sqlite3.Error,
        sqlite3.Warning,
        ValueError,
    ) as error:  # ValueError: text that is no text, such as a zero byte
        raise QueryError(f"it took more than {seconds:g} s" if late else str(error)) from error
    return Table(columns, rows[:most_rows], len(rows) > most_rows)


def _fetched(cursor: sqlite3.Cursor, most_rows: int) -> list[tuple[Any, ...]]:
    rows, size = [], 0
    for row in islice(cursor, most_rows):
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if size > _MOST_BYTES:
            raise QueryError(f"its rows have more than {_MOST_BYTES >> 20} MiB")
        rows.append(row)
    return rows


def _allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and second not in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and first in _TELLING:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY
