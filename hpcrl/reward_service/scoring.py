"""Scores waiting requests in a thread, and keeps the results until they are fetched."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from hpcrl.observe.timeline import IDLE, Timeline

IDLE_S = 5.0
MOST_WAITING = 4096  # responses
KEPT_S = 600.0
_PASSES = 8  # of which the rows are laid out together: those of like length then share one
_MOST_KEPT = 65536  # scores that nobody has fetched


class Scorer(Protocol):
    """Model that scores rows of tokens."""

    @property
    def batch_tokens(self) -> int: ...

    def scores(self, rows: Sequence[Sequence[int]], before: Callable[[], None]) -> list[float]: ...


@dataclass
class _Request:
    rows: list[list[int]]
    scores: list[float] | None = None
    done: float = field(default=0.0)


class Scoring:
    """A queue of requests with one thread, which computes one forward pass at a time.

    Args:
        beat: called before each pass, and now and then while there is nothing to do.
        most_waiting: responses that may wait.
        kept_s: how long scores are kept, also after they were fetched: an answer may get lost.
        timeline: of this process; None: nobody looks at one.

    Attributes:
        failure: what ended the thread; None while it works.
    """

    def __init__(
        self,
        scorer: Scorer,
        beat: Callable[[], None] = lambda: None,
        most_waiting: int = MOST_WAITING,
        kept_s: float = KEPT_S,
        timeline: Timeline | None = None,
    ) -> None:
        self._scorer, self._beat, self._most_waiting, self._kept_s = scorer, beat, most_waiting, kept_s
        self._timeline = timeline
        self._changed = threading.Condition()
        self._waiting, self._known = deque[_Request](), dict[str, _Request]()
        self._in_work, self._scored, self._closed = 0, 0, False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Responses that have no score yet."""
        with self._changed:
            return self._in_work + sum(len(request.rows) for request in self._waiting)

    @property
    def scored(self) -> int:
        """Responses that were scored."""
        return self._scored

    def submit(self, rows: list[list[int]]) -> str | None:
        """Queue a request, and return the name by which its scores are fetched; None where too many wait already."""
        with self._changed:
            waiting = sum(len(request.rows) for request in self._waiting)
            if waiting and waiting + len(rows) > self._most_waiting:
                return None
            name, request = uuid.uuid4().hex, _Request(rows)
            self._forget()
            self._known[name] = request
            self._waiting.append(request)
            self._changed.notify_all()
            return name

    def scores(self, name: str) -> list[float] | None:
        """Return the scores of a request; None where they are not there yet.

        Raises:
            KeyError: no such request is known, or not any more.
        """
        with self._changed:
            self._forget()
            return self._known[name].scores

    def close(self) -> None:
        """End the thread after the pass that it computes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _forget(self) -> None:
        """Let go of scores that are old, and of the oldest ones where there are too many."""
        now = time.monotonic()
        done = [name for name, request in self._known.items() if request.scores is not None]
        kept = sum(len(self._known[name].rows) for name in done)
        for name in done:
            if now - self._known[name].done < self._kept_s and kept <= _MOST_KEPT:
                break  # what follows is younger, but for what was scored together with shorter ones
            kept -= len(self._known.pop(name).rows)

    def _run(self) -> None:
        if self._timeline:
            self._timeline.enter(IDLE)
        try:
            while requests := self._next():
                rows = [row for request in requests for row in request.rows]
                with self._timeline.during("score") if self._timeline else nullcontext():
                    found = iter(self._scorer.scores(rows, self._beat))
                with self._changed:
                    for request in requests:
                        request.scores, request.done = [next(found) for _ in request.rows], time.monotonic()
                    self._in_work, self._scored = 0, self._scored + len(rows)
        except BaseException as error:  # noqa: BLE001  the server raises it
            self.failure = error

    def _next(self) -> list[_Request]:
        """Return the requests that are scored next, in the order in which they came; none at the end."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._beat()
                self._changed.wait(IDLE_S)
            found, tokens = list[_Request](), 0
            while not self._closed and self._waiting and tokens < _PASSES * self._scorer.batch_tokens:
                found.append(self._waiting.popleft())
                tokens += sum(map(len, found[-1].rows))
            self._in_work = sum(len(request.rows) for request in found)
            return found
