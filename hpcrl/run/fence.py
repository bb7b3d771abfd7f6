"""Keeps an attempt that was thought dead from writing into the one that has taken its place."""

from __future__ import annotations

from hpcrl.errors import CommitError
from hpcrl.run.layout import Run
from hpcrl.run.ledger import read_attempts


def require_newest(run: Run, attempt: int) -> None:
    """Look whether `attempt` is still the newest of the run.

    Raises:
        CommitError: a newer one has begun.
    """
    newest = max(read_attempts(run), key=lambda other: other.number, default=None)
    if newest is not None and newest.number > attempt:
        raise CommitError(
            f"attempt {attempt} of {run.name} writes no more: attempt {newest.number} has begun on {', '.join(newest.hosts)}. "
            "End what is left of the older one"
        )
