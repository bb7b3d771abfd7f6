"""A worker's side of the GPU lease: whether its engine may use the GPUs that it shares with the trainer (trainer.placement.colocate_all).

A worker that starts holds the lease. The controller may recall it at any moment. The worker then puts its engine to sleep, whatever runs in
it, and gives the lease back. It gets the lease again when the controller grants it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn


class EngineLease:
    """The lease of one worker.

    Args:
        ask: calls the controller's /lease with `awake`, and returns its answer.
        heard: called with each answer, after this object has changed.

    Attributes:
        recalled: whether the worker is to give it back.
    """

    def __init__(
        self, ask: Callable[[bool], Awaitable[dict[str, Any]]], heard: Callable[[dict[str, Any]], None]
    ) -> None:
        self._ask, self._heard = ask, heard
        self.recalled = False
        self._given_back, self._granted = asyncio.Event(), asyncio.Event()

    async def follow(self) -> NoReturn:
        """Ask the controller whether the lease is recalled, and, once it is given back, when it is granted again."""
        while True:
            answer = await self._ask(not self._given_back.is_set())
            if self._given_back.is_set():
                if answer["lease"]:
                    self.recalled = False
                    self._given_back.clear()
                    self._granted.set()
            elif not answer["lease"]:
                self.recalled = True
            self._heard(answer)
            if answer["stop"]:  # the worker ends
                await asyncio.get_running_loop().create_future()
            if self.recalled:
                await self._given_back.wait()

    async def give_back(self) -> None:
        """Give the lease back, whose engine sleeps; return when it is granted again."""
        self._granted.clear()
        self._given_back.set()
        await self._granted.wait()
