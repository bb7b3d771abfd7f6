"""Pages of docs as they are typed: their blocks, the commands in them, and an environment of requirements.lock alone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.environments import make_environment
from tests.paths import ROOT

Block = tuple[str, str]
"""Language and text of a block of code."""


def blocks(text: str) -> list[Block]:
    """Return the blocks of code of a page, or of a part of it."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def typed(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a block, each with the lines that it prints; shortened ones end in …"""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, printed.splitlines()) for command, _, printed in (part.partition("\n") for part in parts)]


def write_files(place: Path, found: list[Block]) -> None:
    """Write the files that a page shows, each with its path in the first line."""
    for _, text in found:
        if name := re.match(r"# (\w+/\S+\.\w+)\n", text):
            (place / name[1]).parent.mkdir(exist_ok=True)
            (place / name[1]).write_text(text)


def make_locked_environment(place: Path) -> None:
    """Make the environment `.venv` with the packages of requirements.lock alone, as `make demo` does."""
    lock = [line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line]
    absent = {"async-timeout", "exceptiongroup", "setuptools", "typing_extensions"}  # by version of Python
    make_environment(place / ".venv", ["torch", *(name for name in lock if name not in absent)])


def run(place: Path, command: str, timeout: float = 300) -> str:
    """Return what a command prints that is typed in `place`; it has to succeed."""
    environment = {**os.environ, "PATH": f"{place / '.venv' / 'bin'}:{os.environ['PATH']}"}
    for name in ("HPCRL_ROOT", "PYTHONPATH"):
        environment.pop(name, None)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
