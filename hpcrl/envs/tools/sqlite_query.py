"""One query against an SQLite file, as a program of its own, which sqlite.py starts and ends: JSON comes in, JSON goes out.

SQLite asks nobody whether to go on while it evaluates one function, which may take minutes; so its process is killed. It imports nothing but
the standard library: Python's start is most of what a query takes.
"""

from __future__ import annotations

import json
import resource
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

LONGEST_VALUE = 2**20
"""Bytes; zeroblob() and printf() would make a gigabyte."""

MOST_COLUMNS = 500
MOST_BYTES = 64 * 2**20
"""Of all rows."""

_MEMORY = 2**30  # of address space; older Pythons than 3.11 cannot set the limits above
_READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
TELLING = ("table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list")
_FORBIDDEN_FUNCTIONS = ("load_extension", "fts3_tokenizer")


def main() -> None:
    """Answer the request on standard input: `uri`, `sql`, `rows` (at most that many), `seconds` after which SIGALRM ends the process.

    The answer has `error`, or `columns` and `rows`. A value is as JSON has it, or {"hex": ...} for bytes.
    """
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # the kernel ends it at any point of SQLite, and also where the caller is gone
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        with closing(sqlite3.connect(request["uri"], uri=True, isolation_level=None)) as connection:
            answer = _answer(connection, request["sql"], request["rows"])
    # ValueError: text that is no text, such as a zero byte
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        answer = {"error": str(error)}
    except MemoryError:
        answer = {"error": f"it needs more than {_MEMORY >> 20} MiB of memory"}
    json.dump(answer, sys.stdout)


def _answer(connection: sqlite3.Connection, sql: str, most_rows: int) -> dict[str, Any]:
    connection.text_factory = lambda text: text.decode(errors="replace")
    connection.execute("PRAGMA temp_store = MEMORY")  # which is limited, and the disk is not
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MOST_COLUMNS)
    connection.set_authorizer(_allowed)
    cursor = connection.execute(sql)
    rows = list(_bounded(islice(cursor, most_rows)))
    return {"columns": [column[0] for column in cursor.description or ()], "rows": rows}


def _bounded(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[Any]]:
    size = 0
    for row in rows:
        size += sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)
        if size > MOST_BYTES:
            raise ValueError(f"its rows have more than {MOST_BYTES >> 20} MiB")
        yield [{"hex": value.hex()} if isinstance(value, bytes) else value for value in row]


def _allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action in _READING:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and second not in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA and first in TELLING:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


if __name__ == "__main__":
    main()
