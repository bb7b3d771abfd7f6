"""An image for real containers of tests: empty directories, in which those of this machine's operating system and of Python are mounted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SYSTEM = ["/usr:/usr:ro"]
"""What a shell needs inside."""

PYTHON = [
    *SYSTEM,
    *sorted({sys.base_prefix, sys.prefix, *(path for path in sys.path if path.endswith("site-packages"))}),
]
"""What the Python of the tests needs inside."""


def missing(*programs: str) -> str:
    """Return which of these programs are not installed, as the reason of a test that is skipped; empty: none."""
    names = [name for name in programs if shutil.which(name) is None]
    return f"{', '.join(names)} not installed (docs/containers.md)" if names else ""


def make_image(path: Path) -> Path:
    """Make a .sqsh file of directories without files, and return its path."""
    root = path.parent / "root_of_image"
    for name in ("usr", "etc", "dev", "proc", "sys", "run", "tmp", "root", "var/tmp"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/fstab").touch()
    subprocess.run(["mksquashfs", root, path, "-quiet", "-no-progress"], check=True, stdout=subprocess.DEVNULL)
    return path
