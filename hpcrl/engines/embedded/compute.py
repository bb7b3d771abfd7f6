"""The compute thread: one token of all rows after the other, and between two tokens all other uses of the model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from hpcrl.data.vision.reader import SeenImage
from hpcrl.engines.embedded.batch import DecodingBatch, DecodingRequest
from hpcrl.engines.embedded.sampling import Sampling
from hpcrl.rollout.engines.base import Generation, Heard

R = TypeVar("R")
_END_S = 10.0  # a token takes less; a device that hangs must not keep the process
_GATHER_S = 0.002  # between two of the requests that are made together; a token takes as long


@dataclass(frozen=True)
class Limits:
    """Capacity of the engine.

    Attributes:
        rows: that are generated together at most.
        places: tokens that there are caches for at most: rows times the longest of them.
        length: tokens of a prompt and its response together at most.
        alone: samples are generated one after the other: by matrices of other sizes their numbers would round in another way.
    """

    rows: int
    places: int
    length: int
    alone: bool = False


class Compute:
    """The compute thread and its requests.

    Attributes:
        limits: what there is room for.
        version: of the weights.
        resting: whether no tokens are computed; set between tokens only.
        failure: why the thread has ended; None while it has not.
    """

    def __init__(self, batch: DecodingBatch, limits: Limits) -> None:
        self._batch, self.limits, self.version = batch, limits, 0
        self._requests = deque[DecodingRequest]()
        self._orders = deque[Callable[[], None]]()
        self._pending = set[Future[list[Generation]]]()
        self._news, self._ending, self.resting = threading.Condition(), False, False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return self._batch.tokens

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._requests)

    @property
    def usage(self) -> float:
        """Share of the room that is taken."""
        rows, longest = self._batch.size
        return max(rows / self.limits.rows, rows * longest / self.limits.places)

    def generate(
        self,
        prompt: list[int],
        seeds: list[int],
        sampling: Sampling,
        heard: Heard | None = None,
        images: Sequence[SeenImage] = (),
    ) -> DecodingRequest:
        """Generate a response for each seed.

        Args:
            prompt: shorter than `Limits.length`.
            heard, images: as of `Request`.
        """
        limit = min(sampling.max_tokens, self.limits.length - len(prompt))
        request = DecodingRequest(prompt, seeds, sampling, limit, heard=heard, images=images)
        with self._news:
            if not self._unable(request.responses):
                self._pending.add(request.responses)
                request.responses.add_done_callback(self._pending.discard)
                self._requests.extend(request.alone() if self.limits.alone else [request])
                self._news.notify()
        return request

    def between_tokens(self, function: Callable[[], R]) -> Future[R]:
        """Call a function when no token is being computed; the future has what it returns or raises."""
        future: Future[R] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  it is raised again by the waiting call
                future.set_exception(error)

        with self._news:
            if not self._unable(future):
                self._orders.append(run)
                self._news.notify()
        return future

    def recompute(self) -> None:
        """Recompute the caches of all rows; call it between tokens only."""
        self._batch.recompute()

    def drop_caches(self) -> None:
        """Release the caches of all rows until `recompute`; call it between tokens only."""
        self._batch.drop_caches()

    def end(self) -> None:
        """Stop the thread; return when the current token is computed: an interpreter that ends meanwhile is aborted by torch."""
        with self._news:
            self._ending = True
            self._news.notify()
        self._thread.join(_END_S)

    def _unable(self, future: Future[R]) -> bool:
        future.set_running_or_notify_cancel()  # who waits for it may be cancelled, and it must still take a result
        if self.failure is not None:
            future.set_exception(self.failure)
        return self.failure is not None

    def _run(self) -> None:
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._ending or self._orders or self._has_work())
                if not self._batch.size[0]:
                    self._gather()
                with self._news:
                    if self._ending:
                        return
                    orders = list(self._orders)
                    self._orders.clear()
                for order in orders:
                    order()
                with self._news:
                    requests = [] if self.resting else self._admitted()
                if requests:
                    self._batch.join(requests, self.version)
                elif self._batch.size[0] and not self.resting:
                    self._batch.step(self.version)
        except BaseException as error:  # noqa: BLE001  it is raised again by the waiting call
            with self._news:
                self.failure = error
                for future in list(self._pending):
                    future.set_exception(error)

    def _has_work(self) -> bool:
        return not self.resting and bool(self._requests or self._batch.size[0])

    def _gather(self) -> None:
        """Wait as long as further requests come: concurrent ones share one pass over their prompts."""
        known = 0
        while len(self._requests) > known:
            known = len(self._requests)
            time.sleep(_GATHER_S)

    def _admitted(self) -> list[DecodingRequest]:
        found = list[DecodingRequest]()
        rows, longest = self._batch.size
        while self._requests:
            request = self._requests[0]
            if request.unwanted:
                self._requests.popleft()
                continue
            rows, longest = rows + len(request.seeds), max(longest, request.longest)
            full = self.limits.alone or rows > self.limits.rows or rows * longest > self.limits.places
            if rows > len(request.seeds) and full:
                break
            found.append(self._requests.popleft())
        return found
