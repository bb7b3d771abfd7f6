"""Whether this machine has sandboxes for this user, and by which kind of overlay, found by starting one."""

from __future__ import annotations

import os
import shutil
from typing import Any

from hpcrl.errors import SandboxError
from hpcrl.runtime.scratch import Scratch
from hpcrl.sandboxes.images import MOUNT_POINTS
from hpcrl.sandboxes.inside import OVERLAY, TMPFS
from hpcrl.sandboxes.sandbox import NoSandboxes, Sandbox

_FILE = "/tmp/probe"
_FUSE_OVERLAYFS = "fuse-overlayfs"


def expect_sandboxes() -> str:
    """Start a sandbox, write a file in it, and end it, so that what this machine lacks is an error at once, and no reason to wait.

    Returns:
        the path of fuse-overlayfs, where sandboxes of this machine need it; empty where the kernel has what they need.

    Raises:
        NoSandboxes: this machine, or this user, has no sandboxes.
        SandboxError: none has started now.
    """
    try:
        _start("")
    except NoSandboxes as error:
        if error.lacks not in (TMPFS, OVERLAY):
            raise
        if (program := shutil.which(_FUSE_OVERLAYFS)) is None:
            raise NoSandboxes(f"{error}; and {_FUSE_OVERLAYFS} is not installed here", error.lacks) from error
        _start(program)
        return program
    return ""


def _start(fuse_overlayfs: str) -> None:
    scratch = Scratch("probe")
    try:
        for name in MOUNT_POINTS:
            (scratch.path / "image" / name).mkdir(parents=True)
        sandbox = Sandbox(scratch.path / "image", scratch.path, fuse_overlayfs=fuse_overlayfs)
        try:
            sandbox.write(_FILE, b"")  # which takes the list of system calls too
        finally:
            sandbox.end()
    finally:
        scratch.remove()


def sandbox_facts() -> dict[str, Any]:
    """Return what `hpcrl doctor` wants to know of this machine: kernel, whether fuse-overlayfs serves files, and why there are no sandboxes, or
    None, with what it lacks.
    """
    found: dict[str, Any] = {"kernel": os.uname().release, "fuse_overlayfs": "", "error": None, "lacks": ""}
    try:
        found["fuse_overlayfs"] = expect_sandboxes()
    except SandboxError as error:
        found |= {"error": str(error), "lacks": error.lacks if isinstance(error, NoSandboxes) else ""}
    return found
