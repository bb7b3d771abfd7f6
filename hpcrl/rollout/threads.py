"""Calls that block, beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what `function` returns, run in a thread of its own.

    Unlike a thread of asyncio's executor it does not keep the process from ending: an environment may hang, and a claim
    waits long at the controller.
    """
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function(*args, **kwargs)
        except StopIteration as error:  # asyncio takes none, and who awaits would wait for ever
            future.set_exception(RuntimeError(f"StopIteration {error}".strip()))
        except BaseException as error:  # noqa: BLE001  it is raised again by whoever awaits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
