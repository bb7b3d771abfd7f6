"""How long steps take in a Trainer of transformers, which TRL's are, where a step is several of its optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class StepTimes(TrainerCallback):
    """Measures a step from the end of the one before to the end of its last optimizer step.

    Args:
        updates: optimizer steps of a step.
        after: called with the number of a step that has ended and the model, and with 0 before the first; the time belongs to the next step.

    Attributes:
        seconds: of each step.
    """

    def __init__(self, updates: int, after: Callable[[int, Any], None]) -> None:
        self.seconds: list[float] = []
        self._updates, self._after, self._began = updates, after, 0.0

    def on_train_begin(self, *_: Any, **given: Any) -> None:
        self._after(0, given["model"])
        self._began = time.monotonic()

    def on_step_end(self, *positional: Any, **given: Any) -> None:
        _, state, _ = positional
        step, rest = divmod(state.global_step, self._updates)
        if not rest:
            now = time.monotonic()
            self.seconds.append(now - self._began)
            self._began = now
            self._after(step, given["model"])
