"""Programs of benchmarks/ are run by hand and seldom: what they import of this project has to be there still."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.layouts import rows
from tests.paths import ROOT

PROGRAMS = sorted((ROOT / "benchmarks").rglob("*.py"))
PROGRAMS = [path for path in PROGRAMS if ".venv" not in path.parts]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT / "benchmarks")))
def test_what_a_benchmark_imports_is_there(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("hpcrl", "benchmarks"):
            module = import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), (
                    f"{node.module}: {name.name}"
                )


def test_the_page_has_the_layouts_that_the_program_finds() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for row in rows(["Qwen3-0.6B", "Qwen3-30B-A3B"]):
        assert row in page.splitlines()
