"""Base of engines in the worker's own process: a model that a thread loads, and a count of open calls."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Generic, TypeVar

from hpcrl.errors import EngineError, HpcrlError
from hpcrl.rollout.engines.base import Engine, Launched

Loaded = TypeVar("Loaded")
UPDATE, SLEEP = "update_weights", "sleep"
"""Names of calls that take in weights, or leave the memory of the device."""
_POLL_S = 0.1


class InProcessEngine(Engine):
    """An engine whose calls are computed in this process.

    Args:
        replica: name in errors.
    """

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._who = f"the inference engine of {replica}" if replica else "the inference engine"
        self._waiting, self.answered = Counter[str](), 0

    @property
    def waiting(self) -> list[str]:
        return sorted(+self._waiting)

    @property
    def loading(self) -> bool:
        return self._waiting[UPDATE] + self._waiting[SLEEP] > 0

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        """Count a call as open meanwhile; errors of torch and of the model's library become EngineError."""
        self._waiting[what] += 1
        self.changed()
        try:
            yield
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise EngineError(f"{self._who} failed in {what}: {type(error).__name__}: {error}") from error
        finally:
            self._waiting[what] -= 1
            self.answered += 1
            self.changed()


class InProcess(Launched, Generic[Loaded]):
    """An engine of this process, whose model a thread begins to load at once.

    Args:
        what: is loaded, in errors.
    """

    def __init__(self, what: str) -> None:
        self._what, self._loaded = what, Future[Loaded]()
        Thread(target=self._fill, name="load", daemon=True).start()

    @abstractmethod
    def _load(self) -> Loaded:
        """Return what the engine computes with; called once, in a thread, which __init__ starts: subclasses set first what it needs."""

    def wait_ready(self, timeout_s: float, still_waiting: Callable[[], object] = lambda: None) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._loaded.done():
            still_waiting()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._what} was not loaded within {timeout_s:.0f} s (generator.inference_engine.start_timeout_seconds)"
                )
            time.sleep(_POLL_S)
        self._loaded.result()

    def alive(self) -> bool:
        return self._loaded.done() and self._loaded.exception() is None

    def failure(self, what: str) -> EngineError:
        return EngineError(f"the inference engine {what}: {self._loaded.exception()}")

    def stop(self) -> None:
        pass

    def _fill(self) -> None:
        try:
            self._loaded.set_result(self._load())
        except BaseException as error:  # noqa: BLE001  it is raised again by the waiting call
            self._loaded.set_exception(
                error if isinstance(error, HpcrlError) else EngineError(f"the inference engine did not start: {error}")
            )
