"""Divides a response into its thought and the text behind it, for protocols that have a place for each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_END = 16  # tokens in which a mark lies, at the end of a prompt or anywhere
_PART = 256  # tokens that are searched for marks at a time

Decode = Callable[[list[int]], str]
_State = Literal["start", "thought", "behind", "text"]


class Thoughts:
    """The thought and the text of one response, piece by piece; white space beside the marks is in neither.

    A response has a thought if it begins with an opening mark, or if its prompt ends with one.

    Args:
        decode: token ids to text, special tokens included.
        prompt: token ids.

    Attributes:
        close: the mark that ends the thought; empty where none has begun.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        before = decode(list(prompt[-_END:])).rstrip()
        self.close = next((close for start, close in _MARKS if before.endswith(start)), "")
        self._state: _State = "thought" if self.close else "start"
        self._held, self._begun = "", False

    def add(self, piece: str) -> tuple[str, str]:
        """Return what is certain with a further piece of the response: more of the thought, and more of the text."""
        self._held += piece
        if self._state == "start":
            self._start()
        thought = self._thought() if self._state == "thought" else ""
        if self._state == "behind" and self._held.strip():
            self._state, self._held = "text", self._held.lstrip()
        if self._state != "text":
            return thought, ""
        text, self._held = self._held, ""
        return thought, text

    @property
    def has_none(self) -> bool:
        """Whether it is certain that the response has no thought."""
        return self._state == "text" and not self.close

    def end(self) -> tuple[str, str]:
        """Return what is left at the end of the response, as of `add`."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == "thought" else ("", held if self._state == "start" else "")

    def _start(self) -> None:
        text = self._held.lstrip()
        for start, close in _MARKS:
            if text.startswith(start):
                self._state, self.close, self._held = "thought", close, text.removeprefix(start)
        if self._state == "start" and not any(start.startswith(text) for start, _ in _MARKS):
            self._state = "text"

    def _thought(self) -> str:
        held = self._held if self._begun else self._held.lstrip()
        thought, closed, rest = held.partition(self.close)
        if closed:
            self._state, self._held = "behind", rest
            return thought.rstrip()
        begun = (at for at in range(max(0, len(held) - len(self.close)), len(held)) if self.close.startswith(held[at:]))
        sure = len(held[: next(begun, len(held))].rstrip())
        self._begun, self._held = self._begun or bool(held), held[sure:]
        return held[:sure]


def divided(decode: Decode, prompt: Sequence[int], content: str) -> tuple[str, str]:
    """Return the thought and the text of a whole response; arguments as of `Thoughts`."""
    thoughts = Thoughts(decode, prompt)
    (thought, text), (more_thought, more_text) = thoughts.add(content), thoughts.end()
    return thought + more_thought, text + more_text


def count_thought(decode: Decode, prompt: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return how many tokens of a whole response, its first ones, are its thought, with the marks that are among them.

    Tokens are decoded once up to the end of the thought, or of the part in which it is certain that there is none.

    Args:
        token_ids: of the response, without the one that ends it; other arguments as of `Thoughts`.
    """
    said, thoughts = list(token_ids), Thoughts(decode, prompt)
    for at in range(0, len(said), _PART):
        if not thoughts.close:
            thoughts.add(decode(said[at : at + _PART]))
        if thoughts.has_none:
            return 0
        begin, end = max(0, at - _END), min(len(said), at + _PART)
        if thoughts.close and thoughts.close in decode(said[begin:end]):
            ends = range(begin + 1, end)
            return begin + 1 + bisect_left(ends, True, key=lambda upto: thoughts.close in decode(said[begin:upto]))
    return len(said) if thoughts.close else 0
