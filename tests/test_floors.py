"""Imports only go down (DESIGN: floors), and what a login node runs needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "hpcrl.cli": 9, "hpcrl.cli_config": 8, "hpcrl.cli_checkpoint": 8, "hpcrl.cli_cluster": 8, "hpcrl.cli_views": 8, "hpcrl.cli_env": 8, "hpcrl.cli_eval": 8, "hpcrl.cli_plan": 8, "hpcrl.cli_replay": 8, "hpcrl.cli_samples": 8, "hpcrl.cli_run": 7, "jobs": 7,
    "hpcrl.trainer": 6, "hpcrl.rollout": 6, "hpcrl.controller": 6, "hpcrl.launch": 6,
    "hpcrl.algorithms": 5, "hpcrl.envs": 5, "hpcrl.data": 5, "hpcrl.observe": 5,
    "hpcrl.types": 4, "hpcrl.run": 3, "hpcrl.config": 2, "hpcrl.errors": 1, "hpcrl": 0,
}  # fmt: skip
FILES = sorted([*(ROOT / "hpcrl").rglob("*.py"), *(ROOT / "jobs").glob("*.py")])
LOGIN = ["hpcrl.cli", "hpcrl.cli_config", "hpcrl.cli_checkpoint", "hpcrl.run.checkpoints", "hpcrl.config", "hpcrl.launch.submit", "hpcrl.launch.agent", "hpcrl.launch.registry",
         "hpcrl.launch.logs", "hpcrl.launch.stop", "hpcrl.launch.finish", "hpcrl.launch.preflight", "hpcrl.launch.resume",
         "hpcrl.launch.sweep", "hpcrl.config.convert.cosmos", "hpcrl.config.convert.skyrl", "hpcrl.observe.view", "hpcrl.run.call",
         "hpcrl.cli_cluster", "hpcrl.cli_views", "hpcrl.cli_env", "hpcrl.launch.doctor.examine", "hpcrl.launch.attach",
         "hpcrl.cli_samples", "hpcrl.data.rollouts", "hpcrl.cli_replay", "hpcrl.launch.replay", "hpcrl.cli_eval", "hpcrl.launch.evaluate",
         "hpcrl.cli_plan", "hpcrl.launch.models", "hpcrl.launch.groups", "hpcrl.launch.devices", "hpcrl.trainer.estimate"]  # fmt: skip


def room(module: str) -> str:
    """Return the entry of FLOORS that a module belongs to."""
    parts = module.split(".")
    return next(name for n in (2, 1) if (name := ".".join(parts[:n])) in FLOORS)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("hpcrl", "jobs")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    own = room(str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__"))
    for name in imports(path):
        other = room(name)
        assert other == own or FLOORS[other] < FLOORS[own], f"{own} (floor {FLOORS[own]}) imports {name}"


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 62, f"{path}: {node.name}"


@pytest.mark.parametrize("module", LOGIN)
def test_login_node_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
