"""Imports only go down (DESIGN: floors) and never in a circle, rooms stay small, and what a login node runs needs no torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.structure import FLOORS, Code, folder_cycles, module_cycles, upward

CODE = Code.of()
IMPORTS = functools.cache(CODE.imports)
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 61
WITH_TORCH = (
    "jobs", "hpcrl.types", "hpcrl.algorithms", "hpcrl.data.group_file", "hpcrl.data.models", "hpcrl.data.vision.classes", "hpcrl.data.vision.inputs", "hpcrl.data.weight_files", "hpcrl.data.weights.stream", "hpcrl.trainer", "hpcrl.rollout", "hpcrl.controller", "hpcrl.reward_service", "hpcrl.envs",
    "hpcrl.planning.activations", "hpcrl.planning.estimate", "hpcrl.planning.memory", "hpcrl.planning.partition", "hpcrl.planning.shapes", "hpcrl.planning.whole_model",
    "hpcrl.families",
)  # fmt: skip
"""Modules, and folders, that may import torch; all others run on a login node."""
WITHOUT_TORCH = ".family", ".rules", ".settings", ".data", ".launch"
"""Ends of the names of families' modules that run on a login node."""

SECTIONS_OF_FAMILIES = {"diffusers", "vla"}


def test_imports_only_go_down() -> None:
    wrong = [f"{one.module}:{one.line} imports {one.target}" for one in upward(IMPORTS())]
    assert not wrong, "\n".join([*wrong, f"floors: {FLOORS}"])


def test_no_module_imports_itself_through_others() -> None:
    """Imports within functions and under TYPE_CHECKING count."""
    for cycle in module_cycles(IMPORTS()):
        lines = [f"{one.module}:{one.line}" for one in IMPORTS() if {one.module, one.target} <= set(cycle)]
        pytest.fail(f"these modules import each other: {', '.join(cycle)}\n" + "\n".join(lines))


def test_no_folder_imports_itself_through_others() -> None:
    assert folder_cycles(CODE, IMPORTS()) == []


def test_files_and_functions_stay_small() -> None:
    for path in [*CODE.files.values(), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, path
        if path.is_relative_to(ROOT / "tests"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < MOST_LINES_OF_A_FUNCTION, f"{path}: {node.name}"


def test_login_node_needs_no_torch() -> None:
    families = [name for name in CODE.files if within(name, "hpcrl.families") and name.endswith(WITHOUT_TORCH)]
    modules = families + [name for name in CODE.files if not name.startswith(WITH_TORCH)]
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    heavy = sorted({{"torch", "transformers", "vllm"}} & set(sys.modules))
    if heavy:
        sys.exit(f"{{name}} imports {{heavy}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_imports_a_family() -> None:
    """Families are found by name (hpcrl/config/family.py)."""
    wrong = [
        one for one in IMPORTS() if within(one.target, "hpcrl.families") and not within(one.module, "hpcrl.families")
    ]
    assert not wrong, "\n".join(f"{one.module}:{one.line} imports {one.target}" for one in wrong)


def test_only_families_read_their_settings() -> None:
    """Nothing asks which family a policy is of, under any name: settings of families are read by families, and by what reads other formats."""
    owners = "hpcrl.families", "hpcrl.config.sections", "hpcrl.config.convert"
    for name, path in CODE.files.items():
        if any(within(name, owner) for owner in owners):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert node.attr not in SECTIONS_OF_FAMILIES, f"{name}:{node.lineno} reads {node.attr}"


def within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")
