"""Finds an engine that hangs: vLLM's server answers /health with 200 also when the process that computes does not get on."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hpcrl.errors import EngineError
from hpcrl.rollout.client import EngineClient
from hpcrl.run.awake import AwakeClock

_LOOK_S = 1.0
_LONGEST_S = 10.0  # between two looks, one of which may wait for an answer


async def watch_progress(engine: EngineClient, stall_s: float, load_s: float) -> None:
    """Return never; an engine gets on as long as it ends calls or generates tokens, or has nothing to do.

    Args:
        stall_s: how long calls may wait without either.
        load_s: the same while it takes in new weights.

    Raises:
        EngineError: it hangs.
    """
    clock, seen = AwakeClock(_LONGEST_S), (0, 0.0)
    since = clock.now()
    while True:
        await asyncio.sleep(_LOOK_S)
        tokens: float | None = seen[1]
        with suppress(EngineError):  # no answer is no progress
            tokens = await engine.tokens()
        now, limit = clock.now(), load_s if engine.loading else stall_s
        uncounted = tokens is None and not engine.loading
        if not engine.waiting or uncounted or (engine.answered, tokens) != seen:
            since, seen = now, (engine.answered, tokens or 0.0)
        if now - since > limit:
            raise EngineError(
                f"the inference engine hangs: no token and no answer for {limit:.0f} s, while {', '.join(engine.waiting)} wait; "
                "generator.inference_engine.stall_timeout_seconds is the limit"
            )
