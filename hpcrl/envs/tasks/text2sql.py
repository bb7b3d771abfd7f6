"""A question to a database: the policy may look around by queries, then answers by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.tags import first_block
from hpcrl.envs.tools.columns import lacking
from hpcrl.envs.tools.sqlite import QueryError, database_file, query
from hpcrl.errors import ConfigError, UserCodeError

ROWS, CHARACTERS = 50, 8000
"""What a query shows at most."""

SECONDS = 5.0
"""What a query may take; the ground truth and what is compared with it as well."""

MOST_ROWS = 100_000
"""What is compared at most."""

# Folders of the datasets that SkyRL-SQL names in its column `data`.
_FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
_FORM = "Write a query as <sql>…</sql> to see what it finds, or your answer as <solution>…</solution>."


class Text2SQL(Environment):
    """Answer a question by a query of an SQLite database, after looking around in it.

    Several turns. Reward 1 if the query in <solution> finds the rows that the ground truth finds, 0 if others, -1 if there is none.

    Rows are compared as sets: neither their order nor how often one appears counts, the order of columns does.

    Args:
        extras: `reward_spec.ground_truth` is a query; `db_id` names the database <db_id>/<db_id>.sqlite, in the folder of `data`
            (synsql, spider or bird) where the row has that column; or `db_file` is its path. Both begin at
            `environment.skyrl_gym.text2sql.db_path`.

    Raises:
        ConfigError: db_path is not set.
        DataError: the row lacks one of them, or its database is missing or outside db_path.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        folder = extras["skyrl_gym"].text2sql.db_path
        if folder is None:
            raise ConfigError(
                "environment.skyrl_gym.text2sql.db_path: required by text2sql: the folder of the databases"
            )
        truth = truth_of(extras)
        if not isinstance(truth, str) or not truth.strip():
            raise lacking("text2sql", "reward_spec", "a query as `ground_truth`", truth)
        self._truth, self._file = truth, database_file(folder, _name(extras))
        self._left: int = extras["max_turns"]
        self._metrics = {"queries": 0.0, "failed_queries": 0.0}

    def solution(self) -> str | None:
        return f"<solution>{self._truth}</solution>"

    def state(self) -> str | None:
        return json.dumps([self._left, self._metrics])

    def resume(self, state: str) -> None:
        self._left, self._metrics = json.loads(state)

    def step(self, action: str) -> Turn:
        self._left -= 1
        block = first_block(action, ("sql", "solution"))
        if block and block[0] == "solution":
            return self._end(float(self._right(block[1])))
        if self._left <= 0:
            return self._end(-1.0)
        found = self._look(block[1]) if block else _FORM
        turns = "1 turn is" if self._left == 1 else f"{self._left} turns are"
        said = f"<observation>\n{found}\n</observation>\n{turns} left."
        return Turn([{"role": "user", "content": said}], 0.0, done=False, metrics=dict(self._metrics))

    def _end(self, reward: float) -> Turn:
        return Turn([], reward, done=True, metrics={**self._metrics, "solved": float(reward == 1)})

    def _look(self, sql: str) -> str:
        self._metrics["queries"] += 1
        try:
            return query(self._file, sql, ROWS, SECONDS).text(CHARACTERS).rstrip("\n")
        except QueryError as error:
            self._metrics["failed_queries"] += 1
            return f"Error: {error}"[:CHARACTERS]

    def _right(self, sql: str) -> bool:
        try:
            expected = query(self._file, self._truth, MOST_ROWS, SECONDS)
        except QueryError as error:
            raise UserCodeError(f"the ground truth {self._truth!r:.200} fails: {error}") from error
        if expected.more:
            raise UserCodeError(f"the ground truth {self._truth!r:.200} finds more than {MOST_ROWS} rows")
        try:
            found = query(self._file, sql, MOST_ROWS, SECONDS)
        except QueryError:
            return False
        return not found.more and set(found.rows) == set(expected.rows)


def _name(extras: Mapping[str, Any]) -> str:
    name, source, path = (extras.get(column) for column in ("db_id", "data", "db_file"))
    if isinstance(path, str) and path:
        return path
    if not isinstance(name, str) or not name:
        raise lacking("text2sql", "db_id", "the name of a database, or `db_file` with its path", name)
    if source is not None and source not in _FOLDERS:
        raise lacking("text2sql", "data", f"one of {', '.join(_FOLDERS)}, or none", source)
    return f"{_FOLDERS[source]}/{name}/{name}.sqlite" if source else f"{name}/{name}.sqlite"
