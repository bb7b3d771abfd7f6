"""The quickstart's task: answer `sort: gdbca` with `abcdg`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.envs.base import Environment, Turn
from hpcrl.errors import DataError


class SortLetters(Environment):
    """Put letters in order; the text must be the sorted letters and nothing else.

    One turn, reward 1 or 0. A response that is cut before its end marker fails too: it has run past the last letter.

    Args:
        extras: `reward_spec.ground_truth` holds the sorted letters.

    Raises:
        DataError: the prompt's row has no ground truth.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        answer = (extras.get("reward_spec") or {}).get("ground_truth")
        if not isinstance(answer, str) or not answer:
            raise DataError(
                "sort_letters: the row needs a column `reward_spec` with the sorted letters as `ground_truth`, "
                f"found {extras.get('reward_spec')!r:.80}"
            )
        self._answer = answer

    def solution(self) -> str | None:
        return self._answer

    def step(self, action: str) -> Turn:
        right = sum(given == wanted for given, wanted in zip(action, self._answer, strict=False))
        metrics = {"letters_in_place": right / len(self._answer)}
        return Turn([], float(action == self._answer), done=True, metrics=metrics)
