"""Serves a reward model until a stop request."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable

from hpcrl.reward_service.api import RewardApi
from hpcrl.reward_service.model import RewardModel
from hpcrl.reward_service.scoring import Scoring
from hpcrl.runtime.http_server import Guard, Proof, serve
from hpcrl.runtime.process_status import RENEW_S

_LOOK_S = 0.2
_FETCH_S = 2.0


def asked_to_stop() -> threading.Event:
    """Return the event that SIGTERM and SIGINT set from now on, instead of ending the process."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    return asked


async def serve_rewards(
    model: RewardModel,
    name: str,
    listener: socket.socket,
    proof: Proof,
    scoring: Scoring,
    asked: threading.Event,
    tell: Callable[[dict[str, int]], None] = lambda _: None,
    grace_s: float = 6.0,
) -> None:
    """Answer requests until it is asked to stop; then score what waits, within the grace, and leave its clients time to fetch it.

    Args:
        name: what the model is called.
        scoring: the queue of this model; closed at the end.
        tell: called at the beginning, and every few seconds, with how many responses wait, and how many were scored.
    """
    api = RewardApi(model, scoring, name)

    async def until_stopped() -> None:
        reported = float("-inf")
        while not asked.is_set() and scoring.failure is None:
            if time.monotonic() - reported > RENEW_S:
                tell(api.counts())
                reported = time.monotonic()
            await asyncio.sleep(_LOOK_S)
        api.closing, deadline, waited = True, time.monotonic() + grace_s, scoring.waiting
        while scoring.waiting and scoring.failure is None and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        if waited and scoring.failure is None:
            await asyncio.sleep(_FETCH_S)

    try:
        await serve(Guard(api.routes(), proof), listener, until_stopped())
    finally:
        scoring.close()
    if scoring.failure is not None:
        raise scoring.failure
