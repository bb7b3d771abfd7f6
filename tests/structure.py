"""How the code hangs together: imports, cycles, floors, and the size of files and folders.

python -m tests.structure [ROOT]     prints the numbers of a checkout
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

FLOORS = {
    "hpcrl.cli": 8, "hpcrl.engines": 8, "hpcrl.families": 8,
    "jobs": 7, "hpcrl.planning": 7,
    "hpcrl.trainer": 6, "hpcrl.rollout": 6, "hpcrl.controller": 6, "hpcrl.launch": 6,
    "hpcrl.reward_service": 6,
    "hpcrl.observe": 5, "hpcrl.upload": 5, "hpcrl.sandboxes": 5,
    "hpcrl.data": 4, "hpcrl.runtime": 4, "hpcrl.docs": 4,
    "hpcrl.algorithms": 3, "hpcrl.envs": 3, "hpcrl.rundir": 3, "hpcrl.convert": 3,
    "hpcrl.config": 2,
    "hpcrl.types": 1, "hpcrl.errors": 1, "hpcrl.units": 1, "hpcrl.text": 1, "hpcrl.faults": 1, "hpcrl": 0,
}  # fmt: skip
"""Imports go from a floor to a lower one, or stay within a folder."""

SMALL = 60
"""Lines of a module of which one asks whether it is part of its only importer."""

PRIVATE = re.compile(r"\b(?:said|told|speaks|anew|whoever)\b", re.IGNORECASE)
"""Words that docstrings of this field do without."""


@dataclass(frozen=True)
class Import:
    """One imported module of ours.

    Attributes:
        hidden: not at the top of the module: within a function, or under TYPE_CHECKING.
    """

    module: str
    line: int
    target: str
    hidden: bool


@dataclass(frozen=True)
class Code:
    """The product's modules, by dotted name."""

    root: Path
    files: Mapping[str, Path]

    @classmethod
    def of(cls, root: Path = ROOT) -> Code:
        paths = sorted([*(root / "hpcrl").rglob("*.py"), *(root / "jobs").glob("*.py")])
        names = [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths]
        return cls(root, dict(zip(names, paths, strict=True)))

    def imports(self) -> list[Import]:
        """Return all imports of our own modules, wherever in a module they stand."""
        return [found for module, path in self.files.items() for found in self._imports_of(module, path)]

    def _imports_of(self, module: str, path: Path) -> Iterator[Import]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = {name if name in self.files else node.module for name in names}
            elif isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            else:
                continue
            for target in sorted(targets & set(self.files)):
                yield Import(module, node.lineno, target, node not in tree.body)


def floor_of(module: str) -> tuple[str, int]:
    """Return the folder of a module that has a floor, and the floor."""
    parts = module.split(".")
    name = next(name for n in (2, 1) if (name := ".".join(parts[:n])) in FLOORS)
    return name, FLOORS[name]


def upward(imports: Iterable[Import]) -> list[Import]:
    """Return the imports that go up, or to another folder of the same floor."""
    found = []
    for one in imports:
        (own, floor), (other, below) = floor_of(one.module), floor_of(one.target)
        if own != other and below >= floor:
            found.append(one)
    return found


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (R. Tarjan, SIAM J. Comput. 1, 1972)."""
    graph: dict[str, set[str]] = defaultdict(set)
    for start, end in edges:
        graph[start].add(end)
        graph[end] |= set()
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            at = stack.index(node)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def module_cycles(imports: Iterable[Import]) -> list[list[str]]:
    return cycles((one.module, one.target) for one in imports if one.module != one.target)


def folder_cycles(code: Code, imports: Iterable[Import]) -> list[list[str]]:
    """Return the cycles between the subfolders of each folder, its own modules each counted as a subfolder."""
    found = []
    for folder in sorted({path.parent for path in code.files.values()}):
        parent = ".".join(folder.relative_to(code.root).parts)
        edges = set()
        for one in imports:
            own, other = _below(parent, one.module), _below(parent, one.target)
            if own and other and own != other:
                edges.add((own, other))
        found += cycles(edges)
    return found


def with_one_importer(code: Code, imports: Iterable[Import]) -> dict[str, str]:
    """Return the modules that exactly one other module imports, each with that one."""
    importers: dict[str, set[str]] = defaultdict(set)
    for one in imports:
        if one.module != one.target and code.files[one.target].name != "__init__.py":
            importers[one.target].add(one.module)
    return {module: min(of) for module, of in sorted(importers.items()) if len(of) == 1}


def private_words(code: Code) -> Counter[str]:
    """Count the words of `PRIVATE` in docstrings, those of attributes included."""
    return Counter(
        word.lower()
        for path in code.files.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for word in PRIVATE.findall(node.value.value)
    )


def _below(folder: str, module: str) -> str | None:
    rest = module.removeprefix(f"{folder}.")
    return rest.partition(".")[0] if rest != module else None


def describe(root: Path) -> str:
    code = Code.of(root)
    imports = code.imports()
    hidden = [one for one in imports if one.hidden]
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in code.files.items()}
    per_folder: dict[str, list[int]] = defaultdict(list)
    for module, path in code.files.items():
        if path.name != "__init__.py":
            per_folder[str(path.parent.relative_to(root))].append(lines[module])
    real = [size for module, size in lines.items() if code.files[module].name != "__init__.py"]
    single, words = with_one_importer(code, imports), private_words(code)
    small = sorted(module for module in single if lines[module] <= SMALL)
    rows = [
        f"{'folder':36} files  lines  longest",
        *(f"{folder:36} {len(sizes):5} {sum(sizes):6} {max(sizes):8}" for folder, sizes in sorted(per_folder.items())),
        f"files {len(real)}, lines {sum(real)}, of at most 60 lines {sum(size <= 60 for size in real)}, longest {max(real)}",
        f"imports {len(imports)}, hidden {len(hidden)} ({100 * len(hidden) / len(imports):.1f} %)",
        f"modules with one importer {len(single)}, {sum(map(lines.__getitem__, single))} lines; of at most {SMALL} lines {len(small)}:",
        *(f"  {module} ({lines[module]}), of {single[module]}" for module in small),
        f"private words in docstrings {words.total()}: {dict(words.most_common())}",
        f"module cycles {[len(cycle) for cycle in module_cycles(imports)]}, folder cycles {folder_cycles(code, imports)}",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(describe(Path(sys.argv[1]) if sys.argv[1:] else ROOT))
