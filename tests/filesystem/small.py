"""A filesystem that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_filesystem(path: Path, size: str) -> Iterator[bool]:
    """Mount a filesystem of so many bytes, as `mount` writes them, at a new directory; yield whether this may be done here."""
    path.mkdir(parents=True)
    mounted = (
        os.getuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
        ).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


def fill(directory: Path) -> None:
    """Write a file that takes all that is free on the filesystem of a directory."""
    with suppress(OSError), (directory / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
