"""Finds published weights in the run directory and brings them to this node before any engine is asked to pause."""

from __future__ import annotations

import time
from pathlib import Path

from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import CommitError
from hpcrl.rollout.weights.copies import NodeCopies
from hpcrl.rundir.commit import is_committed
from hpcrl.units import readable_size

_POLL_S = 0.2
_PART = 8 << 20


def fetch(source: Path, copies: NodeCopies | None = None, patience_s: float = 60.0) -> PublishedWeights:
    """Return a committed version once this node has all of it in its page cache, or in a copy; what its files hold is compared where they are
    loaded.

    The replicas of a node share both: what one has read, the others do not read from the shared filesystem again.

    Args:
        copies: where there is no room for one, the version is read where it was published, and a warning printed: the engine can still
            have it, and another start of the replica would find no more room.
        patience_s: how long `source` may stay invisible: the news of it can be faster than a network filesystem.

    Raises:
        CommitError: it did not appear, or a file is missing, cut short or cannot be read, or is copied and holds something else.
    """
    deadline = time.monotonic() + patience_s
    while not is_committed(source) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    weights, buffer = PublishedWeights.read(source), bytearray(_PART)
    if weights.base and not copies:
        raise CommitError(
            f"{source} has the changes of a version only, which are applied to a copy of it on each node: set "
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
        for file in sorted(source.glob("*.safetensors")):
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
    except OSError as error:  # retired meanwhile
        raise CommitError(f"{source}: {error}") from error
    return weights
