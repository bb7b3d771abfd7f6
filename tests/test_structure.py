"""Imports only go down (DESIGN: floors) and never in a circle, rooms stay small, and what a login node runs needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.structure import FLOORS, Code, folder_cycles, module_cycles, upward

CODE = Code.of()
IMPORTS = CODE.imports()
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 61
WITH_TORCH = (
    "jobs", "hpcrl.types", "hpcrl.algorithms", "hpcrl.data.group_file", "hpcrl.data.models", "hpcrl.data.pi05.network", "hpcrl.data.pi05.probe", "hpcrl.data.pi05.source", "hpcrl.data.vision.classes", "hpcrl.data.vision.inputs", "hpcrl.data.weight_files", "hpcrl.data.weights.stream", "hpcrl.trainer", "hpcrl.rollout", "hpcrl.controller", "hpcrl.reward_service", "hpcrl.envs",
    "hpcrl.planning.activations", "hpcrl.planning.estimate", "hpcrl.planning.memory", "hpcrl.planning.partition", "hpcrl.planning.pipelines", "hpcrl.planning.shapes",
    "hpcrl.families.openvla.generate", *(f"hpcrl.families.{name}.{layer}" for name in ("diffusion", "pi05", "openvla", "text") for layer in ("rollout", "trainer", "plan")),
)  # fmt: skip
"""Modules, and folders, that may import torch; all others run on a login node."""


def test_imports_only_go_down() -> None:
    wrong = [f"{one.module}:{one.line} imports {one.target}" for one in upward(IMPORTS)]
    assert not wrong, "\n".join([*wrong, f"floors: {FLOORS}"])


def test_no_module_imports_itself_through_others() -> None:
    """Imports within functions and under TYPE_CHECKING count."""
    for cycle in module_cycles(IMPORTS):
        lines = [f"{one.module}:{one.line}" for one in IMPORTS if {one.module, one.target} <= set(cycle)]
        pytest.fail(f"these modules import each other: {', '.join(cycle)}\n" + "\n".join(lines))


def test_no_folder_imports_itself_through_others() -> None:
    assert folder_cycles(CODE, IMPORTS) == []


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
    modules = [name for name in CODE.files if not name.startswith(WITH_TORCH)]
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


KNOW_FAMILIES = {
    "hpcrl.cli.plan",
    "hpcrl.config.families",
    "hpcrl.config.rules.families.diffusion",
    "hpcrl.launch.local.evaluate",
    "hpcrl.config.rules.families.pi05",
    "hpcrl.config.rules.families.vla",
    "hpcrl.launch.submit.preflight",
    "hpcrl.trainer.backends.build",
    "hpcrl.trainer.build",
    "hpcrl.trainer.offline.modes",
}
"""Where a part is chosen by the family of the policy: what loads models, reads prompts and decodes tokens, and rules."""


def test_only_what_chooses_a_family_asks_for_it() -> None:
    asked = "is_diffusion(", "moves_by_flow("
    asking = {name for name, path in CODE.files.items() if any(each in path.read_text() for each in asked)}
    assert {name for name in asking if not name.startswith(("hpcrl.config.convert", "hpcrl.families"))} == KNOW_FAMILIES
