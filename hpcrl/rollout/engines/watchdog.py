"""Ends work with an engine that dies or hangs, with an error that has the reason.

vLLM's server answers /health with 200 also when the process that computes makes no progress, so its tokens and answers are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.runtime.heartbeat import SuspendAwareClock

R = TypeVar("R")

_POLL_PROCESS_S = 0.5
_POLL_S = 1.0
_LONGEST_S = 10.0  # between two polls, one of which may wait for an answer


async def run_watched(
    launched: Launched, engine: Engine, loops: Sequence[Coroutine[Any, Any, R]], stall_s: float, load_s: float
) -> R:
    """Run coroutines that use an engine until the first returns, and return its result.

    In the end all other tasks of this event loop are cancelled.

    Args:
        stall_s, load_s: as in `watch_progress`.

    Raises:
        EngineError: the engine died, with the first error and the end of its log, or it hangs, or refused a request.
    """
    running = [asyncio.create_task(loop) for loop in loops]
    watching: list[asyncio.Task[NoReturn]] = [
        asyncio.create_task(_watch_process(launched)),
        asyncio.create_task(watch_progress(engine, stall_s, load_s)),
    ]
    try:
        await asyncio.wait([*running, *watching], return_when=asyncio.FIRST_COMPLETED)
        results = [task.result() for task in (*running, *watching) if task.done()]
        return results[0]
    except EngineError as error:
        if launched.alive() and await engine.healthy():
            raise
        raise launched.failure("died") from error
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        # those that have failed as well: asyncio would report each, after the reason for which the work ends
        await asyncio.gather(*left, *running, *watching, return_exceptions=True)


async def _watch_process(launched: Launched) -> NoReturn:
    while launched.alive():
        await asyncio.sleep(_POLL_PROCESS_S)
    raise EngineError("the inference engine ended")


async def watch_progress(engine: Engine, stall_s: float, load_s: float) -> NoReturn:
    """Watch an engine until it hangs. It makes progress as long as it answers calls or generates tokens, sleeps, or has nothing to do.

    Args:
        stall_s: how long calls may wait without either.
        load_s: the same while it takes in new weights.

    Raises:
        EngineError: it hangs.
    """
    clock, seen = SuspendAwareClock(_LONGEST_S), (0, 0.0)
    since = clock.now()
    while True:
        await asyncio.sleep(_POLL_S)
        tokens: float | None = seen[1]
        with suppress(EngineError):  # no answer is no progress
            tokens = await engine.tokens()
        now, limit = clock.now(), load_s if engine.loading else stall_s
        uncounted = tokens is None and not engine.loading
        rests = engine.asleep and not engine.loading
        if not engine.waiting or uncounted or rests or (engine.answered, tokens) != seen:
            since, seen = now, (engine.answered, tokens or 0.0)
        if now - since > limit:
            raise EngineError(
                f"the inference engine hangs: no token and no answer for {limit:.0f} s, while {', '.join(engine.waiting)} wait; "
                "generator.inference_engine.stall_timeout_seconds is the limit"
            )
