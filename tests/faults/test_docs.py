"""README.md of this folder names tests that are there, and all scenarios."""

from __future__ import annotations

import ast
import re

from tests.paths import ROOT

_PAGE = (ROOT / "tests" / "faults" / "README.md").read_text()
_NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def names_in(file: str) -> set[str]:
    path = ROOT / file if "/" in file else ROOT / "tests" / "faults" / file
    assert path.is_file(), file
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    named = _NAMED.findall(_PAGE)
    assert len(named) > 60
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []


def test_every_scenario_has_its_line() -> None:
    lines = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", _PAGE, re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    not_run = [number for number, tests in lines if not _NAMED.search(tests)]
    assert all(tests.startswith("not run: ") for number, tests in lines if number in not_run)
    assert len(not_run) <= 5


def test_every_scenario_of_this_folder_is_named() -> None:
    here = {name for path in (ROOT / "tests" / "faults").glob("test_*.py") for name in names_in(path.name)}
    scenarios = {name for name in here if re.match(r"test_\d\d_", name)}
    assert scenarios - {name for _, name in _NAMED.findall(_PAGE)} == set()
