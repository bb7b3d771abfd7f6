"""Environments that a program registers with SkyRL-Gym before it trains, and whether it does anything beside that.

The program is parsed, never run.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.config.import_path import IMPORT_PATH

_GYM = "skyrl_gym"
_PACKAGES = {"__future__", "dotenv", "hydra", "omegaconf", "ray", "skyrl", "skyrl_train", _GYM, "sys", "typing"}
_OF_EVERY_MAIN = {
    "BasePPOExp",
    "from_cli_overrides",
    "get",
    "initialize_ray",
    "load_dotenv",
    "main",
    "remote",
    "run",
    "validate_cfg",
}
"""What SkyRL's main_base calls, and load_dotenv. Another function, or another package that is imported, may change the run."""


@dataclass
class Registered:
    """Calls of skyrl_gym's `register` in a program.

    Attributes:
        names: id to entry point, "package.module:Class".
        unread: lines of calls that have no such two texts, or further arguments for the environment.
        trains_alike: whether the program otherwise does what SkyRL's main_base does.
    """

    names: dict[str, str] = field(default_factory=dict)
    unread: list[int] = field(default_factory=list)
    trains_alike: bool = False


def registered_in(path: Path) -> Registered:
    """Return the environments that a program registers; none where the file is no Python."""
    found = Registered()
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return found
    nodes = list(ast.walk(tree))
    imported, called = _imported_from_gym(nodes), set[str]()
    for node in nodes:
        for function in _called_by(node):
            root, last = _root_and_last(function)
            if isinstance(node, ast.Call) and root in imported and imported.get(last, last) == "register":
                _add(node, found)
            else:
                called.add(last)
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    found.trains_alike = called <= _OF_EVERY_MAIN | own and not any(map(_may_change_more, nodes))
    return found


def _called_by(node: ast.AST) -> list[ast.expr]:
    """Return what a node calls: the function of a call, or the decorators of a function that are no calls."""
    if isinstance(node, ast.FunctionDef):
        return [one for one in node.decorator_list if not isinstance(one, ast.Call)]
    return [node.func] if isinstance(node, ast.Call) else []


def _imported_from_gym(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the names here of what is imported from skyrl_gym, with their names there."""
    found = dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and _packages(node) == {_GYM}:
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.Import) and _GYM in _packages(node):
            found |= {alias.asname or _GYM: alias.name for alias in node.names if alias.name.partition(".")[0] == _GYM}
    return found


def _packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the packages that a statement imports from; "." for the program's own."""
    if isinstance(node, ast.ImportFrom):
        return {"." if node.level else (node.module or "").partition(".")[0]}
    return {alias.name.partition(".")[0] for alias in node.names}


def _root_and_last(function: ast.expr) -> tuple[str, str]:
    """Return the first and the last name of what is called: gym and register of gym.envs.register(…); empty of anything else."""
    last = function.attr if isinstance(function, ast.Attribute) else ""
    while isinstance(function, ast.Attribute):
        function = function.value
    root = function.id if isinstance(function, ast.Name) else ""
    return root, last or root


def _add(call: ast.Call, found: Registered) -> None:
    given = dict(zip(("id", "entry_point", "kwargs"), call.args, strict=False))
    given |= {one.arg or "**": one.value for one in call.keywords}
    name, path = (getattr(given.get(argument), "value", None) for argument in ("id", "entry_point"))
    if len(given) == 2 and isinstance(name, str) and isinstance(path, str) and IMPORT_PATH.fullmatch(path):
        found.names[name] = path
    else:
        found.unread.append(call.lineno)


def _may_change_more(node: ast.AST) -> bool:
    """Return whether a statement may replace a part of SkyRL or change a setting.

    That is a class, an assignment to an attribute or an item, and an import of another package or under another name.
    """
    if isinstance(node, ast.Import | ast.ImportFrom):
        packages = _packages(node)
        return not packages <= _PACKAGES or (packages != {_GYM} and any(alias.asname for alias in node.names))
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        return not all(isinstance(target, ast.Name) for target in targets)
    return isinstance(node, ast.ClassDef | ast.AsyncFunctionDef | ast.Lambda)
