"""Events of protocols whose answers are blocks: a thought, a text, tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from hpcrl.rollout.endpoint.requests import Request
from hpcrl.rollout.endpoint.session import SessionAnswer
from hpcrl.rollout.endpoint.thoughts import Decode, Thoughts

Block = Literal["thought", "text"]


class BlockEvents(ABC):
    """The one answer of a request as server-sent events; a block begins when there is some of it.

    Args:
        name: of the answer; no other has it.
        decode: token ids to text, special tokens included.
    """

    def __init__(self, request: Request, name: str, decode: Decode) -> None:
        self._request, self._name, self._decode = request, name, decode
        self._thoughts: Thoughts | None = None
        self._sent: dict[Block, str] = {}
        self._open: Block | None = None

    def piece(self, prompt: Sequence[int], _number: int, text: str, *_: Any) -> bytes:
        """Return the events of a piece; empty where nothing of it is certain yet."""
        self._thoughts = self._thoughts or Thoughts(self._decode, prompt)
        thought, shown = self._thoughts.add(text)
        begin = self._begin(prompt) if (thought or shown) and not self._sent else ()
        return b"".join([*begin, *self._more("thought", thought), *self._more("text", shown)])

    def end(self, answers: Sequence[SessionAnswer]) -> Iterator[bytes]:
        """Return the events of the rest of the answer."""
        (answer,) = answers
        if not self._sent:
            yield from self._begin(answer.prompt)
        yield from self._more("thought", answer.thought[len(self._sent.get("thought", "")) :])
        yield from self._more("text", answer.shown[len(self._sent.get("text", "")) :])
        if not self._sent and not answer.calls:
            yield from self._more("text", "", even_empty=True)
        yield from self._close()
        for place in range(len(answer.calls)):
            yield from self._call(answer, place)
        yield from self._finish(answer)

    def _more(self, block: Block, text: str, even_empty: bool = False) -> list[bytes]:
        if not text and not even_empty:
            return []
        opening = [] if self._open == block else [*self._close(), *self._opening(block)]
        self._open, self._sent[block] = block, self._sent.get(block, "") + text
        return [*opening, *self._delta(block, text)]

    def _close(self) -> list[bytes]:
        closed, self._open = self._open, None
        return list(self._closing(closed, self._sent[closed])) if closed else []

    @abstractmethod
    def _begin(self, prompt: Sequence[int]) -> Iterator[bytes]:
        """Return the first events."""

    @abstractmethod
    def _opening(self, block: Block) -> Iterator[bytes]:
        """Return the events at the beginning of a block."""

    @abstractmethod
    def _delta(self, block: Block, text: str) -> Iterator[bytes]:
        """Return the events of more of a block."""

    @abstractmethod
    def _closing(self, block: Block, text: str) -> Iterator[bytes]:
        """Return the events at the end of a block, which has this text."""

    @abstractmethod
    def _call(self, answer: SessionAnswer, place: int) -> Iterator[bytes]:
        """Return the events of a tool call."""

    @abstractmethod
    def _finish(self, answer: SessionAnswer) -> Iterator[bytes]:
        """Return the last events."""
