"""Environments with some of the packages that are installed here, as `pip install` of their names makes them; nothing is downloaded."""

from __future__ import annotations

import sys
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import tomli
from packaging.requirements import Requirement

from tests.paths import ROOT


def dependencies() -> list[str]:
    """Return the requirements of an installation without extras, which has no torch."""
    return tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def locked() -> list[str]:
    """Return the packages of requirements.lock, and torch."""
    lines = [line.partition("==") for line in (ROOT / "requirements.lock").read_text().splitlines()]
    absent = {"async-timeout", "exceptiongroup", "setuptools", "torch", "typing_extensions"}  # by version of Python
    return ["torch", *(name for name, equal, _ in lines if equal and name not in absent)]


def make_environment(folder: Path, names: Iterable[str]) -> Path:
    """Make a virtual environment with hpcrl of this checkout, the named packages and what they require; return its folder of programs."""
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    waiting, linked = [Requirement(name).name for name in names], set[str]()
    while waiting:
        name = waiting.pop()
        if name in linked:
            continue
        linked.add(name)
        found = distribution(name)
        needs = map(Requirement, found.requires or [])
        waiting += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(found.locate_file(top))
    (packages / "hpcrl.pth").write_text(f"{ROOT}\n")
    program = folder / "bin" / "hpcrl"
    program.write_text(
        f"#!{folder}/bin/python\nimport sys\nfrom hpcrl.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    program.chmod(0o700)
    return folder / "bin"
