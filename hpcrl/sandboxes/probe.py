"""Whether this machine has sandboxes for this user, found by starting one."""

from __future__ import annotations

import os
from typing import Any

from hpcrl.errors import SandboxError
from hpcrl.runtime.scratch import Scratch
from hpcrl.sandboxes.images import MOUNT_POINTS
from hpcrl.sandboxes.sandbox import NoSandboxes, Sandbox

_FILE = "/tmp/probe"


def expect_sandboxes() -> None:
    """Start a sandbox, write a file in it, and end it, so that what this machine lacks is an error at once, and no reason to wait.

    Raises:
        NoSandboxes: this machine, or this user, has no sandboxes.
        SandboxError: none has started now.
    """
    scratch = Scratch("probe")
    try:
        for name in MOUNT_POINTS:
            (scratch.path / "image" / name).mkdir(parents=True)
        sandbox = Sandbox(scratch.path / "image", scratch.path)
        try:
            sandbox.write(_FILE, b"")  # which takes the list of system calls too
        finally:
            sandbox.end()
    finally:
        scratch.remove()


def sandbox_facts() -> dict[str, Any]:
    """Return what `hpcrl doctor` wants to know of this machine: kernel, and why there are no sandboxes, or None with the step that failed."""
    found: dict[str, Any] = {"kernel": os.uname().release, "error": None, "lacks": ""}
    try:
        expect_sandboxes()
    except SandboxError as error:
        found |= {"error": str(error), "lacks": error.lacks if isinstance(error, NoSandboxes) else ""}
    return found
