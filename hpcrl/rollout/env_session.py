"""The environment of one sample; or, in its place, rewards by name or of a service, which end the sample after one turn.

Code of users is called here only: in a thread, within a time limit, and with errors that say where they come from.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from hpcrl.envs.base import Environment, Messages, Turn, user_code
from hpcrl.envs.registry import make_environment
from hpcrl.envs.rewards.response import Response, Scorer, truth_of
from hpcrl.errors import DataError, UserCodeError
from hpcrl.types import Work

R = TypeVar("R")


@dataclass(frozen=True)
class Limits:
    """Limits of the calls of environments.

    Attributes:
        stepping: bounds how many run at the same time; None: they run one after the other and without threads, so that no time
            limit can be kept.
        seconds: of each call, the wait for its turn not counted; 0: any time.
    """

    stepping: asyncio.Semaphore | None
    seconds: float


class EnvSession:
    """The environment or the rewards of one sample.

    Args:
        rewards: used instead of an environment; None: the environment that the prompt names.
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
        self._where = who if rewards else f"environment {work.prompt.env_class!r}, {who}"

    async def open(self) -> Messages:
        """Return the messages that start the sample."""
        messages = list(self._work.prompt.messages)
        if self._rewards is not None:
            return messages

        def begin() -> Messages:
            self._environment = make_environment(self._work.prompt.env_class, self._extras)
            return self._environment.init(messages)

        return await self._call(begin)

    async def step(self, text: str, n_tokens: int) -> Turn:
        """Return the answer to the policy's text, which has `n_tokens` tokens.

        Raises:
            HpcrlError: of environments and rewards, with where it happened; UserCodeError also for a call that takes too long.
        """
        turn = await self._call(lambda: self._answer(text, n_tokens))
        with user_code(self._where):
            return _checked(turn)

    async def close(self) -> None:
        """Release what the environment holds; one that took too long does so when it is done, if ever."""
        if self._late:
            threading.Thread(target=self._exclusively, args=(self._close,), daemon=True).start()
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
        with user_code(self._where):
            if limits.stepping is None:
                return function()
            async with limits.stepping:
                call = asyncio.ensure_future(in_thread(self._exclusively, function))
                await asyncio.wait([call], timeout=limits.seconds or None)
                if not call.done():
                    self._late = True
                    call.cancel()
                    raise UserCodeError(f"took longer than environment.timeout_seconds ({limits.seconds:g} s)")
                return call.result()

    def _exclusively(self, function: Callable[[], R]) -> R:
        with self._lock:  # an environment is never called from two threads at once
            return function()


def _checked(turn: Turn) -> Turn:
    """Return the turn with plain Python numbers, which is what files and messages can hold."""
    numbers = {"reward": turn.reward, **turn.metrics}
    for name, value in numbers.items():
        if not math.isfinite(float(value)):
            raise DataError(f"{name} is {value}; expected a finite number")
    return replace(turn, reward=float(turn.reward), metrics={name: float(turn.metrics[name]) for name in turn.metrics})


P = ParamSpec("P")


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
