"""Finds files of a user's own code: modules that settings name as "package.module:name", and their imports from the same folder.

They are found where Python would find them, on PYTHONPATH and python_path, and read, but not imported. What else changes what they do is
not known here: data that they read, modules that they import under a name that they compute, installed packages.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.import_path import IMPORT_PATH

_MOST = 300  # files of one folder; more are hardly what a run is about
_OF_THE_RUN = ("hpcrl", "jobs")  # every attempt imports these from code/ of the run directory


def own_modules(config: Config) -> frozenset[str]:
    """Return the modules that settings name, a user's own settings included."""
    names = [text for text in _texts(config.to_dict()) if IMPORT_PATH.fullmatch(text)]
    return frozenset(name.partition(":")[0] for name in names)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in (*value, *value.values()):
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def own_files(modules: Collection[str]) -> dict[str, list[str]]:
    """Return the files of these modules and of what they import, by the folder of sys.path that holds them, relative to it.

    A module that this machine does not have is left out. Of an installed one, and of one that imports several hundreds of files, only its
    own files are meant.
    """
    named = dict[Path, list[str]]()
    for module in sorted(modules):
        for folder in _folders(module.partition(".")[0]):
            named.setdefault(folder, []).append(module)
    found = dict[str, list[str]]()
    for folder, those in named.items():
        files = set(_closure(folder, those)) if not _is_installed(folder) else set[Path]()
        if not files or len(files) > _MOST:
            files = {path for module in those for path in _files(folder, module)}
        if files:
            found[str(folder)] = sorted(str(path.relative_to(folder)) for path in files)
    return found


def _folders(package: str) -> list[Path]:
    try:
        spec = find_spec(package) if package not in _OF_THE_RUN else None
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    places = spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else [])
    return [Path(place).absolute().parent for place in places]


def _is_installed(folder: Path) -> bool:
    return folder.name in ("site-packages", "dist-packages") or str(folder) == sysconfig.get_path("stdlib")


def _closure(folder: Path, modules: Collection[str]) -> Iterator[Path]:
    """Yield the files below `folder` that the import of these modules reads, by their import statements."""
    seen, wanted = set[Path](), list(modules)
    while wanted and len(seen) <= _MOST:
        for path in _files(folder, wanted.pop()):
            if path not in seen:
                seen.add(path)
                wanted += _imports(folder, path)
                yield path


def _files(folder: Path, module: str) -> Iterator[Path]:
    place = folder
    for part in module.split("."):
        place = place / part
        if not part or (place.parent == folder and part in _OF_THE_RUN):
            return
        if (package := place / "__init__.py").is_file():
            yield package
        elif (file := place.with_name(f"{part}.py")).is_file():
            yield file
            return


def _imports(folder: Path, path: Path) -> Iterator[str]:
    """Yield what a file imports; names that it imports from a package may be modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # its import raises
        return
    package = path.parent.relative_to(folder).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
