"""hpcrl answers golden cases of other frameworks as they do, or differently on purpose; and the replay tells the difference."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.golden.adapters import ADAPTERS
from tests.golden.case import Case, load
from tests.golden.compare import differences
from tests.golden.deliberate import Difference, read
from tests.golden.run import main, replay, replay_file

HERE = Path(__file__).parent
FILES = sorted((HERE / "cases").glob("*.json"))
CASES = [case for path in FILES for case in load(path)]


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "run.py"), str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_case_fails(path: Path) -> None:
    outcomes = replay_file(path)
    assert outcomes
    assert not [(outcome.case.id, outcome.lines) for outcome in outcomes if outcome.state == "failed"]


@pytest.mark.parametrize("difference", read(), ids=lambda difference: difference.instead)
def test_no_deliberate_difference_is_stale(difference: Difference) -> None:
    assert any(difference.matches(case) for case in CASES)
    assert difference.reason
    assert difference.instead
    outputs = {name for case in CASES if difference.matches(case) for name in _names(case.outputs)}
    assert all(any(fnmatchcase(name, pattern) for name in outputs) for pattern in difference.outputs)


@pytest.mark.parametrize("pattern", ADAPTERS)
def test_every_adapter_has_a_case_that_it_passes(pattern: str) -> None:
    cases = [case for case in CASES if fnmatchcase(case.fn, pattern)]
    assert any(replay(case, read()).state == "passed" for case in cases)


def _names(outputs: Any, prefix: str = "") -> list[str]:
    if not isinstance(outputs, dict | list):
        return []
    pairs = outputs.items() if isinstance(outputs, dict) else enumerate(outputs)
    return [name for key, value in pairs for name in (f"{prefix}{key}", *_names(value, f"{prefix}{key}."))]


# The replay itself.

OK = Case(
    "1",
    "validate.batch_sizes",
    {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 4},
    {},
    {"result": "ok"},
)


def test_a_refusal_that_does_not_come_fails() -> None:
    outcome = replay(replace(OK, outputs={"result": "AssertionError"}), [])
    assert outcome.state == "failed"
    assert "expected a refusal (AssertionError)" in outcome.lines[0]


def test_a_refusal_that_nobody_expects_fails() -> None:
    outcome = replay(replace(OK, params={"trainer.train_batch_size": 9, "trainer.policy_mini_batch_size": 4}), [])
    assert outcome.state == "failed"
    assert "multiple of trainer.policy_mini_batch_size" in outcome.lines[0]


def test_a_crash_is_no_refusal() -> None:
    case = Case(
        "1", "config.from_cli", {}, {}, {"raises": "ValueError"}
    )  # without the arguments that the adapter reads
    outcome = replay(case, [])
    assert (outcome.state, outcome.lines) == ("failed", ("KeyError: 'args'",))


def test_a_value_that_is_missing_fails() -> None:
    assert replay(replace(OK, outputs={"result": "ok", "other": 1}), []).lines == ("other: missing, expected 1",)


def test_a_deliberate_difference_is_skipped_and_one_of_an_output_leaves_the_others() -> None:
    whole = Difference("validate.*", "because", "something else", params=(("trainer.train_*", 8),))
    assert replay(OK, [whole]).state == "skipped"
    assert replay(OK, [replace(whole, params=(("trainer.train_*", 9),))]).state == "passed"
    part = replace(whole, outputs=("after.*",))
    assert replay(replace(OK, outputs={"result": "ok", "after": {"a": 1}}), [part]).state == "failed"  # no after at all
    assert replay(replace(OK, outputs={"result": "no", "after": {}}), [part]).state == "failed"


@pytest.mark.parametrize(
    ("settings", "matches"),
    [
        ({"sets": ("a.x", "b.*")}, True),
        ({"sets": ("a.x",)}, False),
        ({"params": (("b.y", "null"),)}, True),
        ({"params": (("b.y", "*"), ("c", 1))}, True),
        ({"params": (("b.y", "*"), ("c", True))}, False),
        ({"params": (("d.e", "[[]1, 2]"),)}, True),
        ({"fn": "other.*"}, False),
    ],
)
def test_patterns_on_what_a_case_sets(settings: dict[str, Any], matches: bool) -> None:
    case = Case("7_f", "some.f", {"c": 1}, {"args": ["b.y=null"], "toml": {"d": {"e": [1, 2]}}}, {})
    assert replace(Difference("some.*", "r", "i"), **settings).matches(case) is matches


def test_what_has_no_adapter_is_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": n, "fn": "no.such", "params": {}, "inputs": {}, "outputs": {}} for n in range(3)]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"meta": None, "cases": rows}))
    result = run(path, "--verbose")
    assert result.returncode == 0
    assert "no adapter: no.such (3)" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1] == "0 passed, 0 failed, 3 skipped"
    assert main([str(path)]) == 0
    assert "no adapter: " not in capsys.readouterr().out


def test_a_failure_is_told_and_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.json"
    row = {"id": "wrong", "fn": OK.fn, "params": dict(OK.params), "inputs": {}, "outputs": {"result": "fine"}}
    path.write_text(json.dumps({"cases": [row]}))
    assert main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "failed: validate.batch_sizes wrong\n    result: expected 'fine', found 'ok'" in said
    assert said.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("text", ["", "[]", '{"cases": [{"id": 1}]}', '{"cases": 3}', "\xff"])
def test_a_file_without_cases_is_an_error_of_its_own(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cases.json"
    path.write_text(text, encoding="latin-1")
    assert main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (1.0, 1.000009),
        (0.0, 9e-7),
        (-100.0, -100.0009),
        (1, 1.0),
        ("nan", math.nan),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ([1, 0], [True, False]),
        ([[1.0]], ((1.0,),)),
        ({"a": [None, "x"]}, {"a": [None, "x"]}),
    ],
)
def test_the_same(expected: Any, found: Any) -> None:
    assert not list(differences(expected, found))


@pytest.mark.parametrize(
    ("expected", "found", "place"),
    [
        (1.0, 1.00002, ""),
        (0.0, 2e-6, ""),
        ("nan", 1.0, ""),
        (1.0, math.nan, ""),
        ("inf", -math.inf, ""),
        (1.0, math.inf, ""),
        (True, 1, ""),
        ("1", 1, ""),
        (None, 0, ""),
        ([1, 2], [1], ""),
        ([1, [2]], [1, [3]], "[1][0]"),
        ({"a": {"b": 1}}, {"a": {}}, "a.b"),
        ({"a": {}}, {"a": {"b": 1}}, "a.b"),
        ({"a": [1]}, {"a": 1}, "a"),
    ],
)
def test_not_the_same_and_where(expected: Any, found: Any, place: str) -> None:
    (line,) = differences(expected, found)
    assert line.startswith(f"{place}: ")


def test_tensors_are_lists() -> None:
    torch = pytest.importorskip("torch")
    assert not list(differences([[1, 0]], torch.tensor([[True, False]])))
    assert not list(differences(["nan", 1.5], torch.tensor([math.nan, 1.5])))
