"""Finds published weights in the run directory and brings them to this node before any engine is asked to pause."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcrl.data.weight_files import SUFFIX, PublishedWeights
from hpcrl.errors import CommitError
from hpcrl.rollout.weights.copies import NodeCopies
from hpcrl.rundir.commit import is_committed
from hpcrl.units import readable_size

_POLL_S = 0.2
_READERS = 8  # threads: one alone gets a fraction of what a parallel filesystem gives
_PART, _SPAN = 8 << 20, 256 << 20


def fetch(
    source: Path, copies: NodeCopies | None = None, patience_s: float = 60.0, *, ahead: bool = True
) -> PublishedWeights:
    """Return a committed version once it is in this node's page cache, or in a copy. Its contents are checked where they are loaded.

    The replicas of a node share both: what one has read, the others do not read from the shared filesystem again.

    Args:
        copies: where the disk is full, the version is read where it was published, with a warning. The engine can still load it, and
            another start of the replica would find no more room.
        patience_s: how long `source` may stay invisible: the news of it can be faster than a network filesystem.
        ahead: whether files that are not copied are read into the page cache; of no use where the engine sleeps, which then waits twice.

    Raises:
        CommitError: it did not appear, or a file is missing, cut short or cannot be read, or is copied and holds something else.
    """
    deadline = time.monotonic() + patience_s
    while not is_committed(source) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    weights = PublishedWeights.read(source)
    if weights.base and not copies:
        raise CommitError(
            f"{source} has only the changes between versions, applied to a copy on each node: set "
            "generator.inference_engine.weight_copy_dir"
        )
    try:
        if copies and not weights.adapter:  # which is small
            return copies.hold(weights)
    except OSError as error:
        if weights.base:
            raise CommitError(
                f"{source} has the changes of a version only, and cannot be applied to it on this node: {error}; make room in "
                "generator.inference_engine.weight_copy_dir, or name another directory"
            ) from error
        print(
            f"warning: no copy of {source} ({readable_size(weights.size)}) on this node, engines read the version there: {error}; make room in "
            "generator.inference_engine.weight_copy_dir, or name another directory",
            flush=True,
        )
    try:
        if ahead:
            read_ahead(sorted(source.glob(f"*{SUFFIX}")))
    except OSError as error:  # retired meanwhile
        raise CommitError(f"{source}: {error}") from error
    return weights


def read_ahead(files: Iterable[Path]) -> None:
    """Read files from end to end into the page cache, in several threads."""
    spans = [(file, start) for file in files for start in range(0, file.stat().st_size, _SPAN)]
    own = threading.local()

    def read(span: tuple[Path, int]) -> None:
        file, at = span
        own.buffer = getattr(own, "buffer", None) or bytearray(_PART)
        opened = os.open(file, os.O_RDONLY)
        try:
            end = at + _SPAN
            while at < end and (count := os.preadv(opened, [own.buffer], at)):
                at += count
        finally:
            os.close(opened)

    with ThreadPoolExecutor(_READERS, "fetch") as pool:
        for _ in pool.map(read, spans):
            pass
