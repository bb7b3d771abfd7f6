"""What of a response can be told while its tokens come: the text that its end cannot take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcrl.data.chat.turns import HALF_A_CHARACTER


class TextInPieces:
    """The text of one response, token by token.

    A piece ends where a character is whole, and before anything that may become a mark, such as a stop text. Once there is a mark
    nothing more is told: what follows is for the whole response to say.

    Args:
        decode: token ids to text, without special tokens.
        marks: texts from whose beginning on nothing is told.
        trims: whether white space at the end is held until more follows.

    Attributes:
        told: the pieces so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], marks: Sequence[str], trims: bool = False) -> None:
        self._decode, self._marks, self._trims = decode, marks, trims
        self._tokens, self._marked = list[int](), False
        # the text of tokens from `_read` on is what they add to those from `_begin` on: alone they might lack their first space
        self._begin = self._read = 0
        self._held = self.told = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """Return what may be told now that these tokens have come."""
        if self._marked:
            return ""
        self._tokens += token_ids
        before, text = (self._decode(self._tokens[self._begin : end]) for end in (self._read, len(self._tokens)))
        if len(text) <= len(before) or text.endswith(HALF_A_CHARACTER):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        self._held += text[len(before) :]
        sure = self._sure()
        piece, self._held = self._held[:sure], self._held[sure:]
        self.told += piece
        return piece

    def _sure(self) -> int:
        """Return how many of the characters that are held belong to no mark, whatever follows."""
        text = self._held
        found = [at for at in (text.find(mark) for mark in self._marks) if at >= 0]
        self._marked = bool(found)
        begun = (at for at in range(len(text)) if any(mark.startswith(text[at:]) for mark in self._marks))
        sure = min([*found, next(begun, len(text))])
        return len(text[:sure].rstrip()) if self._trims else sure
