"""Who answers the policy in one sample: an environment, or rewards by name or of a service, whose answer is the last.

All that users wrote is called here: in a thread, within a time limit, and an exception says where it comes from.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hpcrl.envs.blame import Blame
from hpcrl.envs.environment import Environment, Messages, Turn
from hpcrl.envs.make import make_environment
from hpcrl.envs.rewards.response import Response, Scorer, truth_of
from hpcrl.errors import DataError, UserCodeError
from hpcrl.rollout.threads import in_thread
from hpcrl.types import Work

R = TypeVar("R")


@dataclass(frozen=True)
class Limits:
    """What calls of environments may take.

    Attributes:
        stepping: bounds how many run at the same time; None: they run one after the other and without threads, so that no time
            limit can be kept.
        seconds: of each call, the wait for its turn not counted; 0: any time.
    """

    stepping: asyncio.Semaphore | None
    seconds: float


class Partner:
    """The other side of one sample.

    Args:
        rewards: pay instead of an environment.
        extras: what the environment is made with.
        max_tokens: of each turn.
    """

    def __init__(
        self, work: Work, rewards: Scorer | None, extras: Mapping[str, Any], max_tokens: int, limits: Limits
    ) -> None:
        self._work, self._rewards, self._extras, self._max_tokens = work, rewards, extras, max_tokens
        self._limits = limits
        self._environment: Environment | None = None
        self._late, self._lock = False, threading.Lock()
        who = f"group {work.group_id} (row {work.prompt.uid})"
        self._blame = Blame(who if rewards else f"environment {work.prompt.env_class!r}, {who}")

    async def open(self) -> Messages:
        """Return the messages that start the sample."""
        messages = list(self._work.prompt.messages)
        if self._rewards is not None:
            return messages

        def begin() -> Messages:
            self._environment = make_environment(self._work.prompt.env_class, self._extras)
            return self._environment.init(messages)

        return await self._call(begin)

    async def answer(self, text: str, n_tokens: int) -> Turn:
        """Return what comes of the policy's text of so many tokens.

        Raises:
            HpcrlError: of environments and rewards, with where it happened; UserCodeError also for a call that takes too long.
        """
        turn = await self._call(lambda: self._answer(text, n_tokens))
        with self._blame:
            return _checked(turn)

    async def close(self) -> None:
        """Let the environment give back what it holds; one that took too long does so when it is done, if ever."""
        if self._late:
            threading.Thread(target=self._alone, args=(self._close,), daemon=True).start()
        elif self._rewards is None:
            await self._call(self._close)

    def _close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _answer(self, text: str, n_tokens: int) -> Turn:
        prompt = self._work.prompt
        if self._rewards is None:
            assert self._environment is not None
            return self._environment.step(text)
        return self._rewards(
            Response(
                text=text,
                ground_truth=truth_of(prompt.extras),
                n_tokens=n_tokens,
                max_tokens=self._max_tokens,
                messages=prompt.messages,
                extras=prompt.extras,
            )
        )

    async def _call(self, function: Callable[[], R]) -> R:
        limits = self._limits
        with self._blame:
            if limits.stepping is None:
                return function()
            async with limits.stepping:
                call = asyncio.ensure_future(in_thread(self._alone, function))
                await asyncio.wait([call], timeout=limits.seconds or None)
                if not call.done():
                    self._late = True
                    call.cancel()
                    raise UserCodeError(f"took longer than environment.timeout_seconds ({limits.seconds:g} s)")
                return call.result()

    def _alone(self, function: Callable[[], R]) -> R:
        with self._lock:  # an environment is never called from two threads at once
            return function()


def _checked(turn: Turn) -> Turn:
    """Return the turn with plain Python numbers, which is what files and messages can hold."""
    numbers = {"reward": turn.reward, **turn.metrics}
    for name, value in numbers.items():
        if not math.isfinite(float(value)):
            raise DataError(f"{name} is {value}; expected a finite number")
    return replace(turn, reward=float(turn.reward), metrics={name: float(turn.metrics[name]) for name in turn.metrics})
