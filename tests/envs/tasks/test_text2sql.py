"""Text to SQL: real databases, which nothing can change, and queries that never end or would fill the memory."""

from __future__ import annotations

import hashlib
import os
import resource
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.sections.environment import SkyRLGymConfig, Text2SQLConfig
from hpcrl.envs.registry import make_environment
from hpcrl.envs.tasks import text2sql
from hpcrl.envs.tools.sqlite import QueryError, Table, database_file, query
from hpcrl.errors import ConfigError, DataError, UserCodeError
from tests.rollout.material import children_of, wait_for

SHOP = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE bill (id INTEGER PRIMARY KEY, customer INTEGER REFERENCES customer, amount REAL);
CREATE INDEX of_customer ON bill (customer);
CREATE VIEW rich AS SELECT name FROM customer JOIN bill ON bill.customer = customer.id WHERE amount > 20;
INSERT INTO customer VALUES (1, 'Ada', 'Lyon'), (2, 'Ben', 'Oslo'), (3, 'Cem', 'Oslo'), (4, '<solution>', NULL);
INSERT INTO bill VALUES (1, 1, 10.0), (2, 1, 2.5), (3, 2, 40.0), (4, 3, 1.0);
"""
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "
SLOW = "SELECT instr(zeroblob(1000000), zeroblob(500000) || x'01')"
TRUTH = "SELECT name FROM customer WHERE city = 'Oslo'"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SHOP)
        content = connection.serialize()
    for place in ("shop", "spider/database/shop"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "shop.sqlite").write_bytes(content)
    return tmp_path


def play(folder: Path, *actions: str, turns: int = 5, **columns: Any) -> list[Any]:
    row = {"db_id": "shop", "reward_spec": {"ground_truth": TRUTH}, **columns}
    gym = SkyRLGymConfig(text2sql=Text2SQLConfig(db_path=str(folder)))
    environment = make_environment("text2sql", {"max_turns": turns, "skyrl_gym": gym, **row})
    assert environment.init([{"role": "user", "content": "who?"}]) == [{"role": "user", "content": "who?"}]
    played = [environment.step(action) for action in actions]
    environment.close()
    return played


def seen(turn: Any) -> str:
    (message,) = turn.observations
    assert message["role"] == "user"
    return message["content"]


def test_the_policy_looks_around_and_answers(folder: Path) -> None:
    first, second, last = play(
        folder,
        "I look: <sql> SELECT name, city FROM customer ORDER BY id </sql>",
        "<sql>SELEC 1</sql>",
        "so <solution>SELECT name FROM customer WHERE id IN (3, 2)</solution>",
    )
    assert (first.reward, first.done) == (0.0, False)
    table = "name,city\nAda,Lyon\nBen,Oslo\nCem,Oslo\n<solution>,NULL"
    assert seen(first) == f"<observation>\n{table}\n</observation>\n4 turns are left."
    assert seen(second) == '<observation>\nError: near "SELEC": syntax error\n</observation>\n3 turns are left.'
    assert (last.reward, last.done) == (1.0, True)
    assert last.metrics == {"queries": 2.0, "failed_queries": 1.0, "solved": 1.0}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (TRUTH, 1.0),
        (f"{TRUTH};", 1.0),
        (f"{TRUTH} -- as asked", 1.0),
        (f"{TRUTH} ORDER BY name DESC", 1.0),
        (f"{TRUTH} UNION ALL {TRUTH}", 1.0),
        ("SELECT 'Ben' UNION SELECT 'Cem'", 1.0),
        ("SELECT name, 1 FROM customer WHERE city = 'Oslo'", 0.0),
        ("SELECT name FROM customer", 0.0),
        ("SELECT 'Ben'", 0.0),
        ("", 0.0),
        ("SELECT", 0.0),
        (f"{TRUTH}; {TRUTH}", 0.0),
        ("DELETE FROM customer WHERE city = 'Lyon'", 0.0),
        (f"{ENDLESS} 'Ben' FROM n", 0.0),
    ],
)
def test_what_an_answer_is_worth(folder: Path, answer: str, reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text2sql, "SECONDS", 3.0)
    (turn,) = play(folder, f"<solution>{answer}</solution>")
    assert (turn.reward, turn.done) == (reward, True)


def test_numbers_are_compared_by_value_and_null_is_a_value(folder: Path) -> None:
    truth = {"ground_truth": "SELECT amount FROM bill WHERE id = 1 UNION SELECT NULL"}
    (turn,) = play(folder, "<solution>SELECT 10 UNION SELECT NULL</solution>", reward_spec=truth)
    assert turn.reward == 1.0
    (turn,) = play(folder, "<solution>SELECT '10.0' UNION SELECT NULL</solution>", reward_spec=truth)
    assert turn.reward == 0.0


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        ("no tags", -1.0),
        (f"<sql>{TRUTH}</sql>", -1.0),
        (f"<solution>{TRUTH}", -1.0),
        (f"<sql>SELECT 1</sql><observation>mine</observation><solution>{TRUTH}</solution>", -1.0),
        (f"<observation><solution>{TRUTH}</solution>", 1.0),
        (f"<solution>SELECT 1</solution><solution>{TRUTH}</solution>", 0.0),
    ],
)
def test_the_last_turn_and_tags_that_are_in_the_way(folder: Path, action: str, reward: float) -> None:
    (turn,) = play(folder, action, turns=1)
    assert (turn.reward, turn.done, turn.observations) == (reward, True, [])


def test_without_tags_the_form_is_told(folder: Path) -> None:
    (turn,) = play(folder, "hm", turns=2)
    assert "<solution>…</solution>" in seen(turn)
    assert seen(turn).endswith("1 turn is left.")


WRITES = [
    "INSERT INTO customer VALUES (9, 'x', 'y')",
    "UPDATE bill SET amount = 0",
    "DELETE FROM bill",
    "DROP TABLE bill",
    "CREATE TABLE t (x)",
    "CREATE TEMP TABLE t AS SELECT 1",
    "WITH x AS (SELECT 1) DELETE FROM bill",
    "ATTACH DATABASE '{folder}/new.db' AS new",
    "ATTACH DATABASE '{folder}/spider/database/shop/shop.sqlite' AS other",
    "ATTACH ':memory:' AS m",
    "DETACH main",
    "VACUUM",
    "VACUUM INTO '{folder}/new.db'",
    "PRAGMA journal_mode = WAL",
    "PRAGMA writable_schema = 1",
    "PRAGMA user_version = 7",
    "PRAGMA query_only = 0",
    "PRAGMA hard_heap_limit = 1",
    "PRAGMA temp_store_directory = '{folder}'",
    "BEGIN EXCLUSIVE",
    "SAVEPOINT s",
    "REINDEX",
    "ANALYZE",
    "SELECT load_extension('{folder}/x.so')",
    "SELECT fts3_tokenizer('simple', x'00')",
]


@pytest.mark.parametrize("sql", WRITES)
def test_nothing_is_written(folder: Path, sql: str) -> None:
    path = folder / "shop" / "shop.sqlite"

    def state() -> dict[str, str]:
        return {
            str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()
        }

    before = state()
    with pytest.raises(QueryError, match=r"not authorized|prohibited|no such function|readonly|authorization denied"):
        query(path, sql.format(folder=folder), 10, 30.0)
    assert state() == before


def test_what_reads_is_allowed(folder: Path) -> None:
    path = folder / "shop" / "shop.sqlite"
    reads = {
        "PRAGMA table_info(bill)": 3,
        "PRAGMA foreign_key_list(bill)": 1,
        "SELECT name FROM sqlite_master WHERE type = 'table'": 2,
        "SELECT * FROM rich": 1,
        "EXPLAIN QUERY PLAN SELECT * FROM bill": 1,
        "WITH a AS (SELECT city, count(*) FROM customer GROUP BY city) SELECT * FROM a": 3,
        "SELECT name, rank() OVER (ORDER BY amount) FROM customer JOIN bill ON customer = customer.id": 4,
        f"{ENDLESS} i FROM n LIMIT 3": 3,
        "VALUES (1), (2)": 2,
    }
    assert {sql: len(query(path, sql, 100, 30.0).rows) for sql in reads} == reads


@pytest.mark.parametrize(
    "sql",
    [
        f"{ENDLESS} count(*) FROM n",
        f"{ENDLESS} i FROM n ORDER BY i",
        f"{ENDLESS} a.name FROM customer a, customer b, n WHERE a.name = 'nobody'",
        f"{ENDLESS} i FROM n",
        # within one function, of which the first takes half a minute
        SLOW,
        f"SELECT {', '.join([SLOW[7:]] * 8)}",
        "SELECT printf('%.*c', 1000000000, 'x')",
    ],
)
def test_a_query_without_end_is_ended(folder: Path, sql: str) -> None:
    started = time.monotonic()
    with pytest.raises(QueryError, match=r"it took more than 0.4 s|its rows have more than 64 MiB"):
        query(folder / "shop" / "shop.sqlite", sql, 10**9, 0.4)
    assert time.monotonic() - started < 3


def test_a_query_whose_worker_was_killed_ends(folder: Path) -> None:
    code = f"from pathlib import Path; from hpcrl.envs.tools.sqlite import query; print(1, flush=True); query(Path({str(folder / 'shop/shop.sqlite')!r}), {SLOW!r}, 1, 1.0)"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        (left,) = wait_for(lambda: children_of(worker.pid), 30, "no process for the query")
    finally:
        worker.kill()
        worker.communicate()
    wait_for(lambda: not Path(f"/proc/{left}").exists(), 30, "it goes on")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT zeroblob(1000000000)",
        "SELECT replace(hex(zeroblob(500000)), '0', 'many')",
        "SELECT hex(zeroblob(1000000))",
        f"{ENDLESS} group_concat(printf('%1000d', i)) FROM n",
        f"{ENDLESS} zeroblob(1000000) FROM n",
        f"SELECT {', '.join(['zeroblob(1000000)'] * 600)}",
        f"SELECT '{'x' * 2_000_000}'",
    ],
)
def test_a_query_cannot_take_much_memory(folder: Path, sql: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(QueryError, match=r"too big|too large|too many|too long|more than (?:64 MiB|1 s)"):
        query(folder / "shop" / "shop.sqlite", sql, 10**9, 1.0)
    kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert kept - before < 400 * 1024  # KiB


@pytest.mark.parametrize(
    "sql", ["SELECT 1\0", "\0", "SELECT '\ud800'", "SELECT " + "(" * 5000, "SELECT ?", "SELECT :a"]
)
def test_text_that_is_no_query(folder: Path, sql: str) -> None:
    with pytest.raises(QueryError):
        query(folder / "shop" / "shop.sqlite", sql, 10, 30.0)


def test_values_that_are_no_text_are_shown(folder: Path) -> None:
    (turn,) = play(folder, "<sql>SELECT CAST(x'ff41' AS TEXT), x'00ff', 'a,b'</sql>")
    assert "\ufffdA,b'\\x00\\xff',\"a,b\"\n" in seen(turn)


def test_an_observation_is_bounded(folder: Path) -> None:
    many, wide = play(folder, f"<sql>{ENDLESS} i FROM n</sql>", "<sql>SELECT printf('%.*c', 90000, 'x'), 1</sql>")
    assert seen(many).count("\n") == text2sql.ROWS + 4
    assert "… (only the first 50 rows)" in seen(many)
    assert len(seen(wide)) < text2sql.CHARACTERS + 100
    assert "… (cut)" in seen(wide)
    assert Table(["a"], [], False).text(10) == "a\n"
    (turn,) = play(folder, f"<sql>SELECT no_{'x' * 90000}</sql>")
    assert len(seen(turn)) < text2sql.CHARACTERS + 100


def test_the_database_lies_inside_the_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "shop.sqlite"
    outside.write_bytes((folder / "shop" / "shop.sqlite").read_bytes())
    os.symlink(outside, folder / "link.sqlite")
    os.symlink(folder / "loop", folder / "loop")
    assert database_file(str(folder), "shop/../shop/shop.sqlite") == (folder / "shop" / "shop.sqlite").resolve()
    for name in (str(outside), "../outside0/shop.sqlite", "link.sqlite"):
        with pytest.raises(DataError, match="lies outside"):
            database_file(str(folder), name)
    for name in ("no/such.sqlite", "shop", "", "a\0b", "loop", "x" * 5000):
        with pytest.raises(DataError, match=r"is missing|is no file of"):
            database_file(str(folder), name)
    with pytest.raises(DataError, match="lies outside"):
        play(folder, db_id="../../outside")


def test_which_database_a_row_names(folder: Path) -> None:
    answer = f"<solution>{TRUTH}</solution>"
    for columns in ({"data": "spider"}, {"db_file": "shop/shop.sqlite", "db_id": None}):
        (turn,) = play(folder, answer, **columns)
        assert turn.reward == 1.0


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"db_id": None}, "needs a column `db_id` with the name of a database"),
        ({"db_id": 3}, "needs a column `db_id` with the name of a database"),
        ({"data": "other"}, "needs a column `data` with one of synsql, spider, bird, or none, found 'other'"),
        ({"data": "bird"}, "is missing"),
        ({"reward_spec": None}, "with a query as `ground_truth`, found None"),
        ({"reward_spec": {"ground_truth": " "}}, "with a query"),
    ],
)
def test_rows_that_cannot_be_played(folder: Path, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        play(folder, **columns)


def test_a_ground_truth_that_cannot_be_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for truth, words in (("SELECT x", "fails: no such column"), (f"{ENDLESS} i FROM n", "finds more than 10 rows")):
        monkeypatch.setattr(text2sql, "MOST_ROWS", 10)
        with pytest.raises(UserCodeError, match=words):
            play(folder, "<solution>SELECT 1</solution>", reward_spec={"ground_truth": truth})


def test_the_folder_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"environment.skyrl_gym.text2sql.db_path: required"):
        make_environment("text2sql", {"max_turns": 1, "skyrl_gym": SkyRLGymConfig()})


def test_a_file_that_is_no_database(folder: Path) -> None:
    (folder / "text.sqlite").write_text("hello " * 500)
    (turn,) = play(folder, "<sql>SELECT 1 FROM x</sql>", db_file="text.sqlite")
    assert "file is not a database" in seen(turn)
