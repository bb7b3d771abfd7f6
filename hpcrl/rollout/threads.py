"""Threads for blocking calls: code of users, the controller, the disk. They do not keep the process from ending: an environment may hang,
and a claim waits long at the controller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from hpcrl.envs.base import GIVEN_UP, WAITING

R = TypeVar("R")

_QUICK_S = 0.002
_IDLE_S = 10.0
_WATCH_S = 0.02  # between two looks at time limits: a stopped clock gets to none


class TooLong(Exception):
    """A call has taken longer than it may."""


class StoppableClock:
    """Monotonic seconds without those for which it was stopped; other threads may read it."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = 0.0, None  # seconds lost, and when it was stopped

    def now(self) -> float:
        lost, stopped = self._state
        return (time.monotonic() if stopped is None else stopped) - lost

    def stop(self) -> None:
        """Stop the clock until `go_on`."""
        lost, stopped = self._state
        self._state = lost, time.monotonic() if stopped is None else stopped

    def go_on(self) -> None:
        """Run again, from where the clock was stopped."""
        now = self.now()
        self._state = time.monotonic() - now, None


class Call(Generic[R]):
    """A call that `CallThreads` make.

    Attributes:
        asked, began: by the clock of the threads; began is None while it waits for its turn.
        computed_s: processor time of its thread.
        away_s: it has waited for a place of another sample.
        opens: it begins a sample.
        waits: it waits for a place of another sample, and holds no thread.
        ended: nothing of it runs any more, or will.
        given_up: nobody waits for its end.
        then: called after it in its thread, where it was given up.
        known: done when the loop has heard that it ended or was given up.
    """

    def __init__(self, function: Callable[[], R], limit_s: float, asked: float, *, opens: bool = False) -> None:
        self._function, self._limit_s, self.asked, self.opens = function, limit_s, asked, opens
        self.waits = False
        self.computed_s = self.away_s = 0.0
        self._value: R
        self._error: BaseException | None = None
        self.began: float | None = None
        self.ended = self.given_up = False
        self.then: Callable[[], object] | None = None
        self.known: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def run(self) -> None:
        computed = time.thread_time()
        try:
            self._value = self._function()
        except StopIteration as error:  # no coroutine can raise it
            self._error = RuntimeError(f"StopIteration {error}".strip())
        except BaseException as error:  # noqa: BLE001  it is raised again by the awaiting task
            self._error = error
        self.computed_s = time.thread_time() - computed

    def unwanted(self) -> bool:
        """Return whether it was given up, or the task that waits for it was cancelled."""
        return self.given_up or self.known.cancelled()

    async def result(self) -> R:
        """Return what the function returns, or raise what it raises. Raises TooLong where it takes longer than it may."""
        await self.known
        if self.given_up:
            raise TooLong(f"{self._limit_s:g} s")
        if self._error is not None:
            raise self._error
        return self._value


class CallTimes:
    """Adds up the times of calls."""

    def __init__(self) -> None:
        self._calls, self._queued_s, self._away_s, self._run_s, self._computed_s = 0, 0.0, 0.0, 0.0, 0.0
        self._busy_s, self._busy_since = 0.0, 0.0

    def set_busy(self, busy: bool, now: float) -> None:
        """Note that the first call begins, or the last one has ended."""
        if not busy:
            self._busy_s += now - self._busy_since
        self._busy_since = now

    def add(self, call: Call[Any], now: float) -> None:
        """Add a call that has ended."""
        assert call.began is not None
        self._calls += 1
        self._queued_s += call.began - call.asked - call.away_s
        self._away_s += call.away_s
        self._run_s += now - call.began
        self._computed_s += call.computed_s

    def metrics(self) -> dict[str, float]:
        """Return generate/call_*: the mean seconds that calls took, waited for a thread, and waited for a place, as of a sandbox.

        The share is that of the time with calls in which they had a processor.
        """
        if not self._calls:
            return {}
        return {
            "generate/call_seconds": self._run_s / self._calls,
            "generate/call_queue_seconds": self._queued_s / self._calls,
            "generate/call_place_seconds": self._away_s / self._calls,
            "generate/call_cpu_share": self._computed_s / max(self._busy_s, 1e-9),
        }


class Notices:
    """Sets futures of an event loop from other threads. One wake-up sets all that are due: each costs both sides the interpreter's lock."""

    def __init__(self) -> None:
        self._lock, self._due = threading.Lock(), list[asyncio.Future[None]]()

    def set(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        with self._lock:
            first = not self._due
            self._due.append(future)
        if first:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for future in due:
            if not future.done():
                future.set_result(None)


class CallThreads:
    """Makes calls in a bounded number of threads that are used again, each call within a time limit.

    As long as calls are quick, one thread makes them all; where calls wait, others join it. A call that waits for a place which another
    sample may have, see `WAITING`, does not count meanwhile: that sample's calls need the threads.

    Args:
        most: calls that run at the same time at most, those that were given up not counted; also those that begin samples, with the
            waiting ones.
        seconds: of each call, the waits for its turn and for a place not counted; 0: any time.

    Attributes:
        clock: by which calls are timed; stopped while what they may wait for cannot answer.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds, self.clock = most, seconds, StoppableClock()
        self._lock = threading.Lock()
        self._waiting, self._opening = deque[Call[Any]](), deque[Call[Any]]()
        self._running, self._notices = set[Call[Any]](), Notices()
        self._opened = self._absent = 0  # calls under way that begin samples, or wait for a place
        self._times = CallTimes()
        self._at_work = self._idle = 0  # threads, those that were given up not counted
        self._wake = SimpleQueue[None]()
        self._helping: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None

    def call(self, function: Callable[[], R], *, opens: bool = False) -> Call[R]:
        """Have `function` called as soon as there is a thread for it.

        Args:
            opens: as of Call.
        """
        call, loop = Call(function, self._seconds, self.clock.now(), opens=opens), asyncio.get_running_loop()
        with self._lock:
            self._queue(call).append(call)
            if not self._at_work:
                self._join(loop)
        if self._helping is None:
            self._helping = loop.call_later(_QUICK_S, self._help, loop)
        if self._watching is None and self._seconds:
            self._watching = loop.call_later(self._seconds, self._watch, loop)
        return call

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the calls that have ended since the last time."""
        with self._lock:
            now, times, self._times = self.clock.now(), self._times, CallTimes()
            if self._running:
                times.set_busy(False, now)
                self._times.set_busy(True, now)
            return times.metrics()

    def give_up(self, call: Call[Any], then: Callable[[], object]) -> bool:
        """Do without a call: it is not made if it has not begun. Return whether it runs.

        Args:
            then: called once it has ended, if it runs.
        """
        with self._lock:
            if call.began is None and not call.ended:
                self._queue(call).remove(call)
                call.ended = True
            if call.ended:
                return False
            call.then = then
            self._release(call)
            return True

    def _release(self, call: Call[Any]) -> None:
        """Give up a call that runs, and its thread. The lock is held."""
        if not call.given_up:
            call.given_up = True
            self._leave(call, self.clock.now())
            self._opened -= call.opens
            if call.waits:
                call.waits, self._absent = False, self._absent - 1
            else:
                self._at_work -= 1
            if self._due() is not None and self._at_work < self._most:
                self._join(asyncio.get_running_loop())

    def _queue(self, call: Call[Any]) -> deque[Call[Any]]:
        return self._opening if call.opens else self._waiting

    def _due(self) -> deque[Call[Any]] | None:
        """Return the queue whose first call is next; None where none may begin. The lock is held."""
        queues = [self._waiting, self._opening] if self._opened < self._most else [self._waiting]
        return min(filter(None, queues), key=lambda queue: queue[0].asked, default=None)

    def _join(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have one more thread at work. The lock is held."""
        self._at_work += 1
        if self._idle:
            self._idle -= 1
            self._wake.put(None)
        else:
            threading.Thread(target=self._work, args=(loop,), daemon=True).start()

    def _help(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            may_open = min(len(self._opening), self._most - self._opened)
            for _ in range(min(max(1, self._at_work), self._most - self._at_work, len(self._waiting) + may_open)):
                self._join(loop)
            self._helping = loop.call_later(_QUICK_S, self._help, loop) if self._due() is not None else None

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        oldest = now = self.clock.now()
        with self._lock:
            for call in list(self._running):
                assert call.began is not None
                if now - call.began < self._seconds:
                    oldest = min(oldest, call.began)
                    continue
                self._release(call)
                if not call.known.done():
                    call.known.set_result(None)
            busy = self._running or self._waiting or self._opening or self._absent
        left = max(oldest + self._seconds - now, _WATCH_S)
        self._watching = loop.call_later(left, self._watch, loop) if busy else None

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            while (call := self._next()) is not None:
                WAITING.set(partial(self._away, call, loop))
                GIVEN_UP.set(call.unwanted)
                call.run()
                if not self._end(call, loop):
                    return
            if not self._woken():
                return

    def _woken(self) -> bool:
        """Wait for calls; return False where the thread is to end, and is no longer counted."""
        with suppress(Empty):
            self._wake.get(timeout=_IDLE_S)
            return True
        with self._lock:
            with suppress(Empty):  # woken at the last moment
                self._wake.get_nowait()
                return True
            self._idle -= 1
            return False

    def _next(self) -> Call[Any] | None:
        with self._lock:
            queue = self._due()
            if queue is None or self._at_work > self._most:
                self._at_work -= 1
                self._idle += 1
                return None
            call = queue.popleft()
            self._opened += call.opens
            call.began = self.clock.now()
            self._enter(call)
            return call

    @contextmanager
    def _away(self, call: Call[Any], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Leave the thread's place to another call as long as the block lasts; it may be above `most` for the moment that follows."""
        with self._lock:
            since = self.clock.now()
            if not call.given_up:
                call.waits, self._absent = True, self._absent + 1
                self._leave(call, since)
                self._at_work -= 1
                if self._due() is not None:
                    self._join(loop)
        try:
            yield
        finally:
            with self._lock:
                if call.waits:  # else it was given up
                    assert call.began is not None
                    call.waits, self._absent = False, self._absent - 1
                    away_s = self.clock.now() - since
                    call.began, call.away_s = call.began + away_s, call.away_s + away_s
                    self._at_work += 1
                    self._enter(call)

    def _enter(self, call: Call[Any]) -> None:
        """Count a call as running. The lock is held."""
        if not self._running:
            self._times.set_busy(True, self.clock.now())
        self._running.add(call)

    def _leave(self, call: Call[Any], now: float) -> None:
        """Count a call as running no more. The lock is held."""
        if call in self._running:  # else it waits for a place, and has left before
            self._running.remove(call)
            if not self._running:
                self._times.set_busy(False, now)

    def _end(self, call: Call[Any], loop: asyncio.AbstractEventLoop) -> bool:
        """Note that a call has ended; return whether its thread goes on."""
        with self._lock:
            call.ended = True
            if not call.given_up:
                now = self.clock.now()
                self._leave(call, now)
                self._opened -= call.opens
                self._times.add(call, now)
        if call.given_up:
            if call.then is not None:
                call.then()
            return False
        self._notices.set(loop, call.known)
        return True
