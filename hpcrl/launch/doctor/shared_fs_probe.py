"""Measures whether, and how fast, this machine and a compute node see each other's files in slurm.root, or in another root."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from hpcrl.launch.doctor.finding import Finding, error, ok, warning
from hpcrl.launch.doctor.node import await_file, sees
from hpcrl.launch.doctor.node_session import NodeSession
from hpcrl.rundir.commit import link, write_text

VISIBLE_S = 60.0
_ANSWER_S = 60.0
_SLOW_S = 5.0


def measure_delays(
    node: NodeSession, directory: Path, limit_s: float, folder: str = ""
) -> tuple[dict[str, float | None], int | None]:
    """Write files on this machine and on the node, and measure when the other side sees them.

    Args:
        directory: where the node does the same.
        limit_s: seconds after which a file counts as unseen.
        folder: a folder below `directory`, or an absolute path.

    Returns:
        Seconds until the other side saw a new and a replaced file, None where it did not. Also the owner of a file from there
        if it is not this user.
    """
    delays, names = dict[str, float | None](), [os.path.join(folder, name) for name in ("from-here", "from-there")]
    for kind, content in (("new", "1"), ("replaced", "2")):
        node.request(_ANSWER_S, verb="await", name=names[0], content=content, limit_s=str(limit_s))
        write_text(directory / names[0], content)
        began = time.monotonic()
        seen = node.receive(limit_s + _ANSWER_S)["sees"]
        delays[f"{kind} there"] = time.monotonic() - began if seen else None
        if not seen:
            return delays, None
    owner = os.getuid()
    for kind, content in (("new", "1"), ("replaced", "2")):
        path = directory / names[1]
        sees(path, content)  # this machine's cache of the directory is part of the delay
        node.request(_ANSWER_S, verb="write", name=names[1], content=content)
        began = time.monotonic()
        seen = await_file(path, content, limit_s)
        delays[f"{kind} here"] = time.monotonic() - began if seen else None
        if not seen:
            return delays, None
        owner = path.stat().st_uid
    return delays, owner if owner != os.getuid() else None


def link_finding(directory: Path) -> Finding:
    """Return whether the filesystem has hard links, by one within `directory`."""
    one, other = directory / "link-of", directory / "link"
    one.touch()
    try:
        link(one, other)
    except OSError as refusal:
        found = f"{directory.parent}: none ({refusal.strerror})"
        remedy = "hpcrl claims a name before it renames a file to it; of two reports of an attempt's end the later one may come to stand"
        return warning("hard links", found, remedy)
    return ok("hard links", "of two processes that report how an attempt ended, the first one is believed")


def visibility_finding(
    delays: Mapping[str, float | None], root: Path, host: str, setting: str = "slurm.root"
) -> Finding:
    if missing := [kind.split() for kind, delay in delays.items() if delay is None]:
        kind, where = missing[0]
        found = (
            f"{root}: a {kind} file is not seen {where if where == 'here' else f'on {host}'} after {VISIBLE_S:.0f} s"
        )
        return error("shared filesystem", found, f"{setting} must lie on a filesystem that all nodes share")
    times = {kind: delay for kind, delay in delays.items() if delay is not None}
    found = f"{root}: seen on {host} after {times['new there']:.2f} s (replaced {times['replaced there']:.2f} s)"
    found += f", and here after {times['new here']:.2f} s (replaced {times['replaced here']:.2f} s)"
    if max(times.values()) > _SLOW_S:
        remedy = "hpcrl waits for files, but stop requests and weights take that longer; ask for shorter attribute caching (actimeo)"
        return warning("shared filesystem", found, remedy)
    return ok("shared filesystem", found)
