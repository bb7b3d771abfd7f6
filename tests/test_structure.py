"""Imports only go down (DESIGN: floors) and never in a circle, rooms stay small, and what a login node runs needs no torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

from hpcrl.config.backend import backends
from tests.paths import ROOT
from tests.structure import FLOORS, Code, folder_cycles, module_cycles, upward

CODE = Code.of()
IMPORTS = functools.cache(CODE.imports)
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 61
WITH_TORCH = (
    "jobs", "hpcrl.types", "hpcrl.algorithms", "hpcrl.data.group_file", "hpcrl.data.models", "hpcrl.data.vision.classes", "hpcrl.data.vision.inputs", "hpcrl.data.weight_files", "hpcrl.data.weights.stream", "hpcrl.trainer", "hpcrl.rollout", "hpcrl.controller", "hpcrl.reward_service", "hpcrl.envs",
    "hpcrl.planning.activations", "hpcrl.planning.estimate", "hpcrl.planning.memory", "hpcrl.planning.partition", "hpcrl.planning.shapes", "hpcrl.planning.whole_model",
    "hpcrl.engines", "hpcrl.families", "hpcrl.cli.experiments",
)  # fmt: skip
"""Modules, and folders, that may import torch; all others run on a login node."""
WITHOUT_TORCH = ".backend", ".family", ".rules", ".settings", ".data", ".launch"
"""Ends of the names of modules of families and engines that run on a login node."""

WHOLE_TRAINER = {
    "hpcrl.families.diffusion.model": 2, "hpcrl.families.diffusion.objective": 2, "hpcrl.families.diffusion.plan": 2,
    "hpcrl.families.diffusion.policy": 1, "hpcrl.families.diffusion.settings": 1, "hpcrl.families.diffusion.tasks": 1,
    "hpcrl.families.pi05.policy": 3,
    "hpcrl.launch.doctor.disk_space": 1, "hpcrl.launch.local.replay": 1, "hpcrl.launch.submit.models": 1,
    "hpcrl.observe.alerts.monitor": 2, "hpcrl.planning.rank_groups": 4, "hpcrl.planning.shapes": 1, "hpcrl.rundir.checkpoints": 1,
    "hpcrl.trainer.backends.fsdp.engine": 3, "hpcrl.trainer.backends.megatron.engine": 6,
    "hpcrl.trainer.batching": 1, "hpcrl.trainer.read_batch": 1, "hpcrl.trainer.saving.checkpoint": 1, "hpcrl.trainer.saving.export": 1,
    "hpcrl.trainer.saving.mid_batch": 1, "hpcrl.trainer.scoring.megatron": 1, "hpcrl.trainer.step": 1,
}  # fmt: skip
"""Parameters that are a whole TrainerConfig, by module: engines, and what reads many of its sections. Numbers only go down."""

SECTIONS_OF_FAMILIES = {"diffusers", "vla"}
Nodes = Mapping[str, list[ast.AST]]


@pytest.fixture(scope="module")
def nodes() -> Nodes:
    """All nodes of each module."""
    return {name: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for name, path in CODE.files.items()}


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


def test_files_and_functions_stay_small(nodes: Nodes) -> None:
    for path in [*CODE.files.values(), *(ROOT / "tests").rglob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, path
    for module, found in nodes.items():
        for node in found:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < MOST_LINES_OF_A_FUNCTION, f"{module}: {node.name}"


def test_login_node_needs_no_torch() -> None:
    folders = "hpcrl.families", "hpcrl.engines"
    light = [name for name in CODE.files if any(within(name, one) for one in folders) and name.endswith(WITHOUT_TORCH)]
    modules = light + [name for name in CODE.files if not name.startswith(WITH_TORCH)]
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


@pytest.mark.parametrize("folder", ["hpcrl.families", "hpcrl.engines"])
def test_nothing_imports_a_family_or_an_engine(folder: str) -> None:
    """They are found by name (hpcrl/config/family.py, hpcrl/config/backend.py)."""
    wrong = [one for one in IMPORTS() if within(one.target, folder) and not within(one.module, folder)]
    assert not wrong, "\n".join(f"{one.module}:{one.line} imports {one.target}" for one in wrong)


def test_only_the_command_and_the_pages_know_other_formats() -> None:
    users = "hpcrl.cli", "hpcrl.convert", "hpcrl.docs"
    wrong = [
        one
        for one in IMPORTS()
        if within(one.target, "hpcrl.convert") and not any(within(one.module, user) for user in users)
    ]
    assert not wrong, "\n".join(f"{one.module}:{one.line} imports {one.target}" for one in wrong)


def test_only_families_read_their_settings(nodes: Nodes) -> None:
    """Nothing asks which family a policy is of, under any name: settings of families are read by families, and by what reads other formats."""
    owners = "hpcrl.families", "hpcrl.config.sections", "hpcrl.convert"
    for name, found in nodes.items():
        if any(within(name, owner) for owner in owners):
            continue
        for node in found:
            if isinstance(node, ast.Attribute):
                assert node.attr not in SECTIONS_OF_FAMILIES, f"{name}:{node.lineno} reads {node.attr}"


def test_only_builders_get_the_whole_section_of_the_trainer(nodes: Nodes) -> None:
    """Others get the sections, or the values, that they read."""
    found = {
        name: count
        for name, own in nodes.items()
        if not (within(name, "hpcrl.config") or name.endswith(".build"))
        if (count := _whole_trainers(own))
    }
    assert found == WHOLE_TRAINER, "name the sections that are read in the signature, or lower the number"


def _whole_trainers(nodes: Iterable[ast.AST]) -> int:
    return sum(
        isinstance(node, ast.arg) and node.annotation is not None and "TrainerConfig" in ast.unparse(node.annotation)
        for node in nodes
    )


def test_only_an_engine_compares_its_name(nodes: Nodes) -> None:
    """Nothing asks which engine a configuration names: what reads other formats translates its name, and sections have a default."""
    owners = {name: [backend.package, "hpcrl.convert"] for name, backend in backends().items()}
    for module, held in nodes.items():
        for node in held:
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Dict):
                parts = [key for key in node.keys if key]
            elif isinstance(node, ast.MatchValue):
                parts = [node.value]
            else:
                continue
            for one in (each for part in parts for each in [part, *getattr(part, "elts", ())]):
                name = one.value if isinstance(one, ast.Constant) else None
                allowed = owners[name] if isinstance(name, str) and name in owners else [module]
                assert any(within(module, owner) for owner in allowed), f"{module}:{node.lineno} compares {name!r}"


def within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def test_a_class_name_means_one_thing(nodes: Nodes) -> None:
    """A public class has a name of its own: a search for it finds one definition."""
    found = defaultdict[str, list[str]](list)
    for module, held in nodes.items():
        for node in held:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_the_oldest_python_has_what_is_imported(nodes: Nodes) -> None:
    """Python 3.10 is promised (pyproject), and neither pyright nor a newer Python misses what later standard libraries added."""
    newer = {"tomllib", "compression", "annotationlib"}
    for module, found in nodes.items():
        for node in found:
            if isinstance(node, ast.Import):
                assert newer.isdisjoint(alias.name.partition(".")[0] for alias in node.names), module
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] not in newer, module
