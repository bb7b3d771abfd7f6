"""A shell script as tokens: words, with their quoted parts and expansions marked, and operators.

Nothing is run or expanded here. Comments, redirections' here-documents and lines continued by a backslash are taken out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_OPERATOR = re.compile(r"\d*(?:&>>|&>|<<<|<<-|<<|<>|<&|>>|>&|>\||<|>)|;;|&&|\|\||\|&|[;|&()\n]")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Piece:
    """A part of a word.

    Attributes:
        kind: text, parameter ($NAME or what stands inside ${...}), arithmetic (what stands inside $((...))), command (inside $(...)).
        text: the text, or what is to be expanded.
        quoted: whether it stands in quotes, so that its result is neither split nor a pattern.
        source: as it is written.
    """

    kind: Literal["text", "parameter", "arithmetic", "command"]
    text: str
    quoted: bool
    source: str


Word = tuple[Piece, ...]


@dataclass(frozen=True)
class Token:
    """A word, or an operator, which has none of it; `((` is one with its expression.

    Attributes:
        glued: no blank stands before it.
        line: in which it begins, counted from 1.
    """

    operator: str
    word: Word
    source: str
    glued: bool
    line: int


class NotUnderstood(ValueError):
    """A script that cannot be followed; `line`: where, counted from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def tokens(text: str) -> list[Token]:
    """Return the tokens of a script.

    Raises:
        NotUnderstood: a quote or a bracket is not closed.
    """
    return _Lexer(text.replace("\r\n", "\n")).run()


def word_of(text: str) -> Word:
    """Return a text in which everything but expansions and quotes stands for itself, such as the default in ${NAME:-default}.

    Raises:
        ValueError: a quote or a bracket in it is not closed.
    """
    try:
        return tuple(_Lexer(text).pieces(stop=""))
    except NotUnderstood as error:  # its line is of this text, not of the script
        raise ValueError(f"{text!r}: {error}") from None


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.documents: list[str] = []

    def run(self) -> list[Token]:
        found: list[Token] = []
        glued = False
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter in " \t" or self.text.startswith("\\\n", self.place):
                self.place, glued = self.place + (1 if letter in " \t" else 2), False
            elif letter == "#":
                end = self.text.find("\n", self.place)
                self.place = len(self.text) if end < 0 else end
            else:
                found.append(self._token(glued))
                if found[-1].operator == "\n":
                    self._skip_documents()
                elif len(found) > 1 and found[-2].operator.lstrip("0123456789") in ("<<", "<<-"):
                    self.documents.append("".join(piece.text for piece in found[-1].word))
                glued = True
        return found

    def _token(self, glued: bool) -> Token:
        start, line = self.place, self._line(self.place)
        if self.text.startswith("((", start) and (end := self._arithmetic_end(start + 2)) is not None:
            inner, self.place = self.text[start + 2 : end], end + 2
            source = self.text[start : self.place]
            return Token("((", (Piece("arithmetic", inner, True, source),), source, glued, line)
        if self.text.startswith(("<(", ">("), start):  # process substitution: a name of a file that only a run has
            end = self._closing(start + 1)
            self.place = end + 1
            source = self.text[start : self.place]
            return Token("", (Piece("command", self.text[start + 2 : end], True, source),), source, glued, line)
        if operator := _OPERATOR.match(self.text, start):
            self.place = operator.end()
            return Token(operator[0], (), operator[0], glued, line)
        word = tuple(self.pieces(stop=" \t\n;|&()<>"))
        return Token("", word, self.text[start : self.place], glued, line)

    def _line(self, place: int) -> int:
        return self.text.count("\n", 0, place) + 1

    def _skip_documents(self) -> None:
        for end in self.documents:
            while self.place < len(self.text):
                line, _, _ = self.text[self.place :].partition("\n")
                self.place += len(line) + 1
                if line.lstrip("\t") == end:
                    break
        self.documents = []

    def pieces(self, stop: str) -> list[Piece]:
        """Return the pieces up to one of the letters `stop`, quotes taken away."""
        found: list[Piece] = []
        while self.place < len(self.text) and (self.text[self.place] not in stop or not stop):
            letter, start = self.text[self.place], self.place
            if letter == "\\":
                self.place += 2
                if self.text[start + 1 : self.place] != "\n":
                    found.append(Piece("text", self.text[start + 1 : self.place], True, self.text[start : self.place]))
            elif letter == "'" or self.text.startswith("$'", start):
                found.append(self._single(letter == "$"))
            elif letter == '"' or self.text.startswith('$"', start):
                found += self._double(start + (1 if letter == '"' else 2))
            elif letter in "$`":
                found.append(self._expansion(quoted=False))
            else:
                while self.place < len(self.text) and self.text[self.place] not in stop + "\\'\"$`":
                    self.place += 1
                text = self.text[start : self.place]
                found.append(Piece("text", text, False, text))
        return found

    def _single(self, escapes: bool) -> Piece:
        start = self.place
        end = self.place + (2 if escapes else 1)
        while end < len(self.text) and self.text[end] != "'":
            end += 2 if escapes and self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise NotUnderstood("a quote ' is not closed", self._line(start))
        self.place = end + 1
        text = self.text[start + (2 if escapes else 1) : end]
        if escapes:
            text = re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), text, flags=re.DOTALL)
        return Piece("text", text, True, self.text[start : self.place])

    def _double(self, start: int) -> list[Piece]:
        self.place, found, text = start, list[Piece](), ""
        while self.place < len(self.text) and self.text[self.place] != '"':
            letter = self.text[self.place]
            if letter in "$`":
                found += [Piece("text", text, True, text)] if text else []
                found.append(self._expansion(quoted=True))
                text = ""
                continue
            if letter == "\\" and self.text[self.place + 1 : self.place + 2] in ('"', "\\", "$", "`", "\n"):
                self.place += 1
                letter = self.text[self.place].strip("\n")
            text += letter
            self.place += 1
        if self.place >= len(self.text):
            raise NotUnderstood('a quote " is not closed', self._line(start))
        self.place += 1
        return [*found, Piece("text", text, True, text)] if text or not found else found

    def _expansion(self, quoted: bool) -> Piece:
        start = self.place
        if self.text[start] == "`":
            end = self.text.find("`", start + 1)
            if end < 0:
                raise NotUnderstood("a quote ` is not closed", self._line(start))
            self.place = end + 1
            return Piece("command", self.text[start + 1 : end], quoted, self.text[start : self.place])
        if self.text.startswith("$((", start) and (end := self._arithmetic_end(start + 3)) is not None:
            self.place = end + 2
            return Piece("arithmetic", self.text[start + 3 : end], quoted, self.text[start : self.place])
        if self.text[start + 1 : start + 2] in ("(", "{"):
            end = self._closing(start + 1)
            self.place = end + 1
            kind: Literal["command", "parameter"] = "command" if self.text[start + 1] == "(" else "parameter"
            return Piece(kind, self.text[start + 2 : end], quoted, self.text[start : self.place])
        if name := _NAME.match(self.text, start + 1):
            self.place = name.end()
            return Piece("parameter", name[0], quoted, self.text[start : self.place])
        self.place += 1
        return Piece("text", "$", True, "$")

    def _arithmetic_end(self, start: int) -> int | None:
        """Return where the `))` stands that ends an expression, or None where the brackets are those of commands."""
        depth = 0
        for place in range(start, len(self.text)):
            letter = self.text[place]
            depth += (letter == "(") - (letter == ")")
            if depth < 0:
                return place if self.text.startswith("))", place) else None
        return None

    def _closing(self, start: int) -> int:
        """Return where the bracket at `start` is closed; brackets in quotes do not count."""
        opening, place, depth = self.text[start], start, 0
        while place < len(self.text):
            letter = self.text[place]
            if letter == "\\":
                place += 1
            elif letter == "'" and opening == "(":
                place = self.text.find("'", place + 1) if "'" in self.text[place + 1 :] else len(self.text)
            elif letter == '"':
                inner = _Lexer(self.text)
                inner._double(place + 1)
                place = inner.place - 1
            depth += (letter == opening) - (letter == _CLOSING[opening])
            if depth == 0:
                return place
            place += 1
        raise NotUnderstood(f"a bracket {opening} is not closed", self._line(start))
