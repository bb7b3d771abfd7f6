"""Brings published weights to this node, complete and checked, before the engine is asked to pause."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from hpcrl.errors import CommitError
from hpcrl.rundir.commit import is_committed, verify

_POLL_S = 0.2


def fetch(source: Path, target: Path, patience_s: float = 60.0) -> None:
    """Copy a committed weight directory to `target` and compare the copy with its manifest.

    Args:
        patience_s: how long `source` may stay invisible: the news of it can be faster than a network filesystem.

    Raises:
        CommitError: it did not appear, or a file is missing, cut short or changed.
    """
    deadline = time.monotonic() + patience_s
    while not is_committed(source) and time.monotonic() < deadline:
        if source.parent.is_dir():
            os.listdir(source.parent)  # a fresh listing makes NFS drop what it remembers of the directory
        time.sleep(_POLL_S)
    verify(source, checksums=False)
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target)
        verify(target)
    except (OSError, shutil.Error, CommitError) as error:
        shutil.rmtree(target, ignore_errors=True)
        raise CommitError(f"weights {source} could not be copied to this node: {error}") from error
