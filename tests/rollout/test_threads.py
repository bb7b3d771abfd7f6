"""Calls in threads that are used again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hpcrl.envs.base import WAITING
from hpcrl.envs.tools.sandboxes import Sandboxes
from hpcrl.errors import ServiceError
from hpcrl.rollout.threads import Call, CallThreads, Notices, TooLong

SLOW_S = 0.1


def play(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(main())


async def results(calls: list[Call[Any]]) -> list[Any]:
    return [await call.result() for call in calls]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_quick_calls_start_no_thread_each() -> None:
    used = list[threading.Thread]()

    async def main() -> list[int]:
        threads = CallThreads(32, 300.0)

        def call(number: int) -> int:
            if threading.current_thread() not in used:
                used.append(threading.current_thread())
            return number

        for _ in range(20):
            assert await results([threads.call(lambda n=n: call(n)) for n in range(100)]) == list(range(100))
        return []

    play(main)
    assert len(used) <= 32
    assert threading.main_thread() not in used
    assert all(thread.daemon for thread in used)


@pytest.mark.parametrize("most", [1, 3, 32])
def test_slow_calls_run_at_the_same_time(most: int) -> None:
    running, seen, most_at_once = list[int](), list[int](), min(most, 8)

    def call() -> None:
        running.append(1)
        seen.append(len(running))
        wait_until(lambda: max(seen) >= most_at_once)
        time.sleep(SLOW_S / 10)  # would more of them begin
        running.pop()

    async def main() -> None:
        threads = CallThreads(most, 300.0)
        await results([threads.call(call) for _ in range(8)])

    play(main)
    assert max(seen) == most_at_once


def test_a_call_that_waits_for_a_place_holds_no_thread() -> None:
    """As a sample that waits for a sandbox, which another one has: all threads would wait, and none be left for that one's steps."""

    async def main() -> None:
        threads, free, waiting = CallThreads(2, 30.0), threading.Event(), list[int]()

        def begin(number: int) -> int:
            waiting.append(number)
            with WAITING.get()():
                assert free.wait(60)
            return number

        begun = [threads.call(lambda n=n: begin(n), opens=True) for n in range(6)]
        await asyncio.to_thread(wait_until, lambda: len(waiting) == 2)
        assert await results([threads.call(lambda n=n: n) for n in range(9)]) == list(range(9))
        assert len(waiting) == 2, "as many wait as there may be calls"
        await threads.call(free.set).result()
        assert await results(begun) == list(range(6))
        assert (threads._at_work, threads._opened, threads._absent, len(threads._running)) <= (2, 0, 0, 0)

    play(main)


def test_the_wait_for_a_place_is_not_timed_and_what_follows_is() -> None:
    async def main() -> None:
        threads, given_up, go = CallThreads(1, 2 * SLOW_S), threading.Event(), threading.Event()

        def call(after_s: float) -> str:
            with WAITING.get()():
                time.sleep(4 * SLOW_S)
            time.sleep(after_s)
            return "answer"

        assert await threads.call(lambda: call(0.0)).result() == "answer"
        with pytest.raises(TooLong):
            await threads.call(lambda: call(4 * SLOW_S)).result()

        def waits() -> None:
            with WAITING.get()():
                assert go.wait(60)

        last = threads.call(waits)
        await asyncio.to_thread(wait_until, lambda: last.waits)
        assert threads.give_up(last, given_up.set)
        go.set()
        await asyncio.to_thread(wait_until, given_up.is_set)
        assert await results([threads.call(lambda: "next")]) == ["next"]
        assert threads._at_work <= 1

    play(main)


def test_a_start_of_a_sandbox_waits_without_a_thread() -> None:
    async def main() -> None:
        threads = CallThreads(1, 30.0)
        started = threads.call(lambda: Sandboxes(list).start("image", wait_s=1.0), opens=True)
        await asyncio.to_thread(wait_until, lambda: started.waits)
        assert await threads.call(lambda: started.ended).result() is False
        with pytest.raises(ServiceError, match="no server is there"):
            await started.result()
        times = threads.take_metrics()
        assert times["generate/call_place_seconds"] > 0.4, "on average of two calls"
        assert times["generate/call_queue_seconds"] < 0.4

    play(main)


def test_the_start_of_a_sandbox_ends_with_its_call() -> None:
    """Else it would take a place that samples wait for, up to ten minutes after its own was given up."""
    ended = threading.Event()

    async def main() -> None:
        threads = CallThreads(1, 30.0)
        started = threads.call(lambda: Sandboxes(list).start("image", wait_s=600.0), opens=True)
        await asyncio.to_thread(wait_until, lambda: started.waits)
        assert threads.give_up(started, ended.set)
        assert await asyncio.to_thread(ended.wait, 60)

    play(main)


def test_the_times_of_calls() -> None:
    """Four calls of which two run at a time; calls that wait have no processor."""

    async def main() -> None:
        threads = CallThreads(2, 300.0)
        await results([threads.call(lambda: time.sleep(SLOW_S)) for _ in range(4)])
        found = threads.take_metrics()
        assert found["generate/call_seconds"] >= SLOW_S
        assert found["generate/call_queue_seconds"] > SLOW_S / 4
        assert found["generate/call_cpu_share"] < 0.5
        assert threads.take_metrics() == {}

    play(main)


def test_giving_up_a_call_that_waits_for_a_place_adds_no_time_with_calls() -> None:
    """The share of a processor is that of the time in which calls run, here all of it."""

    def computes() -> None:
        end = time.thread_time() + SLOW_S
        while time.thread_time() < end:
            pass

    async def main() -> None:
        threads, go = CallThreads(1, 300.0), threading.Event()

        def waits() -> None:
            with WAITING.get()():
                assert go.wait(60)

        last = threads.call(waits, opens=True)
        await asyncio.to_thread(wait_until, lambda: last.waits)
        await threads.call(computes).result()
        threads.take_metrics()
        await threads.call(computes).result()
        busy_s = threads._times._busy_s
        time.sleep(SLOW_S)
        assert threads.give_up(last, lambda: None)
        go.set()
        assert threads._times._busy_s == busy_s

    play(main)


def test_errors_are_raised_where_they_are_awaited() -> None:
    def ends() -> None:
        raise StopIteration

    async def main() -> None:
        threads = CallThreads(2, 300.0)
        bad, odd, good = threads.call(lambda: 1 // 0), threads.call(ends), threads.call(lambda: 7)
        assert await good.result() == 7
        with pytest.raises(ZeroDivisionError):
            await bad.result()
        with pytest.raises(RuntimeError, match="StopIteration"):
            await odd.result()

    play(main)


def test_a_call_that_takes_too_long_gives_its_place_to_others() -> None:
    go, after = threading.Event(), list[str]()

    async def main() -> None:
        threads = CallThreads(1, 0.2)
        stuck = threads.call(lambda: go.wait(20))
        waiting = [threads.call(lambda: "made") for _ in range(3)]
        with pytest.raises(TooLong, match=r"^0.2 s$"):
            await stuck.result()
        assert await results(waiting) == ["made"] * 3
        again = threads.call(lambda: go.wait(20))
        with pytest.raises(TooLong):
            await again.result()
        assert threads.give_up(stuck, lambda: after.append("closed"))
        assert after == []

    play(main)
    go.set()
    wait_until(lambda: after == ["closed"])


def test_the_wait_for_a_turn_does_not_count() -> None:
    async def main() -> None:
        threads = CallThreads(1, 0.3)
        await results([threads.call(lambda: time.sleep(SLOW_S)) for _ in range(6)])

    play(main)


def test_calls_that_nobody_wants_any_more() -> None:
    """One that has not begun is not made; one that runs gives its place to others."""
    go, begun, made = threading.Event(), threading.Event(), list[str]()

    def block() -> None:
        begun.set()
        go.wait(20)

    async def main() -> None:
        threads = CallThreads(1, 0.0)
        runs, never = threads.call(block), threads.call(lambda: made.append("never"))
        await asyncio.to_thread(begun.wait, 20)
        assert not threads.give_up(never, lambda: made.append("after never"))
        assert threads.give_up(runs, lambda: made.append("after"))
        assert await threads.call(lambda: "another").result() == "another"
        go.set()
        await asyncio.to_thread(wait_until, lambda: made == ["after"])
        assert not threads.give_up(runs, lambda: made.append("twice"))

    play(main)
    assert made == ["after"]


def test_threads_end_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.rollout.threads._IDLE_S", 0.1)
    used = list[threading.Thread]()

    async def main() -> None:
        threads = CallThreads(4, 300.0)
        await threads.call(lambda: used.append(threading.current_thread())).result()
        await asyncio.to_thread(wait_until, lambda: not used[0].is_alive())
        await threads.call(lambda: used.append(threading.current_thread())).result()

    play(main)
    assert used[0] is not used[1]


def test_one_wake_up_tells_of_all_that_is_done() -> None:
    class Counting(asyncio.SelectorEventLoop):
        woken = 0

        def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
            self.woken += 1
            return super().call_soon_threadsafe(*args, **kwargs)

    async def main() -> None:
        notices, futures = Notices(), [loop.create_future() for _ in range(100)]
        futures[7].cancel()  # who waited for it does so no longer
        thread = threading.Thread(target=lambda: [notices.set(loop, future) for future in futures])
        thread.start()
        thread.join()
        assert not any(future.done() for future in futures[:7])
        await asyncio.wait(futures[8:])
        assert loop.woken == 1
        notices.set(loop, late := loop.create_future())
        await late
        assert loop.woken == 2

    loop = Counting()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    notices, future = Notices(), loop.create_future()
    notices.set(loop, future)  # nobody hears it
    assert not future.done()


def test_time_limits_stand_still_while_the_clock_is_stopped() -> None:
    """What an environment waits for may be an engine that sleeps."""

    async def play() -> None:
        threads, go = CallThreads(2, 0.3), threading.Event()
        waits = threads.call(lambda: go.wait(20))
        threads.clock.stop()
        await asyncio.sleep(1.0)
        assert not waits.given_up
        threads.clock.go_on()
        go.set()
        assert await waits.result()
        hangs = threads.call(lambda: time.sleep(3))
        threads.clock.stop()
        await asyncio.sleep(0.5)
        threads.clock.go_on()
        with pytest.raises(TooLong):
            await hangs.result()
        assert threads.take_metrics()["generate/call_seconds"] < 0.3

    asyncio.run(play())
