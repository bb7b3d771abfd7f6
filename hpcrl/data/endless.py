"""Training prompts that a function makes, one for each group of the prompt stream: each is kept until its group has been trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from hpcrl.errors import DataError
from hpcrl.types import Prompt

ENDLESS = 10**12
"""Prompts that count as one pass: more than a run can train."""
_TRIES = 10
_KEPT = 4096  # fewer are not looked through


class EndlessPrompts(Sequence[Prompt]):
    """Prompts by the indices of their groups.

    Args:
        make: returns the prompt of a row.
        fits: tells whether it is short enough.
    """

    def __init__(self, make: Callable[[int], Prompt], fits: Callable[[Prompt], bool]) -> None:
        self._make, self._fits, self._lock = make, fits, Lock()
        self._kept, self._most = dict[int, Prompt | DataError](), _KEPT

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: Any) -> Any:
        """Return the prompt of group `index`. Raises DataError where the function makes none, or only ones that are too long."""
        self.make(index)
        made = self._kept[index]
        if isinstance(made, DataError):
            raise made
        return made

    def make(self, index: int) -> None:
        """Make the prompt of group `index`, which may take long, and keep it, or the error that it is asked for with."""
        if index in self._kept:
            return
        with self._lock:  # the function need not be safe to call in two threads
            if index not in self._kept:
                self._kept[index] = self._find(index)

    def forget(self, used: Callable[[int], bool]) -> None:
        """Forget the prompts of groups that will not be asked for, where there are many; no other thread makes one meanwhile."""
        if len(self._kept) > self._most:
            self._kept = {index: prompt for index, prompt in self._kept.items() if not used(index)}
            self._most = max(_KEPT, 2 * len(self._kept))

    def _find(self, index: int) -> Prompt | DataError:
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
