"""Whether the nodes of slurm.sandboxes can have sandboxes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.launch.doctor.finding import Finding, error, ok
from hpcrl.sandboxes.inside import FUSE, FUSE_OVERLAYFS, OVERLAY, PROC, TMPFS, USER_NAMESPACES
from hpcrl.sandboxes.sandbox import ORDINARY_USER

_SUBJECT = "sandboxes"
_OTHER_NODES = "choose nodes with a newer kernel (slurm.sandboxes.partition, constraint)"
_INSTALL = "ask the administrators to install fuse-overlayfs"
_REMEDIES = {
    USER_NAMESPACES: (
        "ask the administrators for user namespaces: user.max_user_namespaces above 0; on Ubuntu 24.04 "
        "kernel.apparmor_restrict_unprivileged_userns=0; on older Debian kernel.unprivileged_userns_clone=1"
    ),
    OVERLAY: f"overlayfs in user namespaces needs Linux 5.11: {_INSTALL}, or {_OTHER_NODES}",
    TMPFS: f"tmpfs keeps user attributes since Linux 6.6: {_INSTALL}, or {_OTHER_NODES}",
    FUSE: f"fuse-overlayfs needs Linux 4.18, and /dev/fuse that users may open (module fuse): ask the administrators, or {_OTHER_NODES}",
    FUSE_OVERLAYFS: f"{_INSTALL} as the system's package, or {_OTHER_NODES}",
    PROC: "parts of /proc are hidden, as many containers do: start the run outside of one, or show all of /proc in it",
    ORDINARY_USER: "submit the run as an ordinary user",
}


def sandbox_finding(facts: Mapping[str, Any]) -> Finding:
    """Return whether a node starts sandboxes.

    Args:
        facts: of `sandbox_facts`, and `host`.
    """
    where = f"{facts['host']}, Linux {facts['kernel']}"
    if facts["error"] is None:
        return ok(_SUBJECT, f"one has started on {where}, with {facts['fuse_overlayfs'] or 'overlayfs'}")
    remedy = _REMEDIES.get(facts["lacks"], "look again; if it stays, see docs/sandboxes.md for what a node needs")
    return error(_SUBJECT, f"{where}: {facts['error']}", remedy)
