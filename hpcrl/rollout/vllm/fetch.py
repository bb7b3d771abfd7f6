"""Finds published weights in the run directory, from where the engines of all replicas read them, before any is asked to pause."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcrl.data.weight_files import PublishedWeights
from hpcrl.rundir.commit import is_committed

_POLL_S = 0.2


def fetch(source: Path, patience_s: float = 60.0) -> PublishedWeights:
    """Return a committed version once this node sees all of it; what its files hold is compared where they are loaded.

    Args:
        patience_s: how long `source` may stay invisible: the news of it can be faster than a network filesystem.

    Raises:
        CommitError: it did not appear, or a file is missing or cut short.
    """
    deadline = time.monotonic() + patience_s
    while not is_committed(source) and time.monotonic() < deadline:
        if source.parent.is_dir():
            os.listdir(source.parent)  # a fresh listing makes NFS drop what it remembers of the directory
        time.sleep(_POLL_S)
    return PublishedWeights.read(source)
