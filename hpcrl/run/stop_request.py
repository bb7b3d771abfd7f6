"""control/stop.json: the one way in which everybody tells an attempt to save and to leave, on every cluster."""

from __future__ import annotations

from typing import Literal

from hpcrl.run.commit import read_json, write_json
from hpcrl.run.layout import Run

Reason = Literal["interrupted", "cancelled"]
"""interrupted: the run goes on later; cancelled: it does not."""


def ask_to_stop(run: Run, attempt: int, reason: Reason) -> None:
    """Tell attempt `attempt` to save and to leave."""
    write_json(run.stop, {"attempt": attempt, "reason": reason})


def stop_asked(run: Run, attempt: int) -> Reason | None:
    """Return why somebody has told attempt `attempt` to stop, or None. A file that somebody made by hand interrupts it."""
    try:
        request = read_json(run.stop)
    except ValueError:
        return "interrupted"
    return request["reason"] if request and request["attempt"] == attempt else None
