"""Training prompts that a function makes, one for each group of the prompt stream: none is kept, since each can be made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

from hpcrl.errors import DataError
from hpcrl.types import Prompt

ENDLESS = 10**12
"""Prompts that count as one pass: more than a run can train."""
_TRIES = 10
_KEPT = 4096  # those of groups that are generated are asked for several times


class EndlessPrompts(Sequence[Prompt]):
    """Prompts by the indices of their groups.

    Args:
        make: returns the prompt of a row.
        fits: tells whether it is short enough.
    """

    def __init__(self, make: Callable[[int], Prompt], fits: Callable[[Prompt], bool]) -> None:
        self._make, self._fits = make, fits
        self._made, self._lock = lru_cache(_KEPT)(self._find), Lock()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: Any) -> Any:
        """Return the prompt of group `index`. Raises DataError where the function makes none, or only ones that are too long."""
        made = self._made(index)
        if isinstance(made, DataError):
            raise made
        return made

    def make(self, index: int) -> None:
        """Make the prompt of group `index`, which may take long, and keep it, or the error that it is asked for with."""
        self._made(index)

    def _find(self, index: int) -> Prompt | DataError:
        with self._lock:  # the function need not be safe to call in two threads
            try:
                return self._first_that_fits(index)
            except DataError as error:
                return error

    def _first_that_fits(self, index: int) -> Prompt:
        for number in range(index, index + _TRIES * ENDLESS, ENDLESS):
            prompt = self._make(number)
            if self._fits(prompt):
                return prompt
        raise DataError(
            f"data.train_function: {_TRIES} rows in a row are longer than trainer.max_prompt_length, the first is row {index}; "
            "raise it, or make shorter prompts"
        )
