"""What tests of confined programs share."""

from __future__ import annotations

import subprocess

import pytest

CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *given):
    if getattr(libc, name)(*given) < 0:
        raise OSError(ctypes.get_errno(), name)
"""
"""Code of `call`, which calls a function of libc by its name and raises its error."""

_COMMAND = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', "sh"]


def without_namespaces() -> list[str]:
    """Return what comes before a command that shall find a system without user namespaces: this one makes no more of them. Skips where that cannot be."""
    if subprocess.run([*_COMMAND, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("nobody can make this machine have no user namespaces")
    return _COMMAND
