"""What is known of a shell's variables at one place of a script, and what words become there.

A part of a text that is known only when the script runs, such as $(date), is kept between two marks. No command is ever run.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hpcrl.convert.shell.arithmetic import value_of
from hpcrl.convert.shell.lexer import Piece, Word, word_of

OPEN, CLOSE = "\ue000", "\ue001"
_UNKNOWN = re.compile(f"{OPEN}[^{CLOSE}]*{CLOSE}")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_ALWAYS_SET = {
    "HOME",
    "USER",
    "PWD",
    "OLDPWD",
    "HOSTNAME",
    "PATH",
    "SHELL",
    "RANDOM",
    "SECONDS",
    "UID",
    "TMPDIR",
    "LANG",
}
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
_WORKING_DIRECTORY = ("$PWD", "${PWD}", "$(pwd)", "`pwd`")
"""How a script names the directory in which it is started, before it changes it."""
_TOO_LONG = 100_000
_WHOLE = {ord(blank): 0xE010 + ord(blank) for blank in " \t\n"}  # blanks of a quoted default, at which no word is split
_BLANK = {whole: blank for blank, whole in _WHOLE.items()}


def unknown(source: str) -> str:
    """Return a mark for what is known only when the script runs."""
    return OPEN + source.replace(OPEN, "").replace(CLOSE, "") + CLOSE


def is_known(text: str) -> bool:
    return OPEN not in text


def unknown_parts(text: str) -> list[str]:
    return [part[1:-1] for part in _UNKNOWN.findall(text)]


def in_directory(text: str, directory: str) -> str:
    """Return a text with the directory in which the script is started in place of $PWD."""
    return _UNKNOWN.sub(lambda match: directory if match[0][1:-1] in _WORKING_DIRECTORY else match[0], text)


def replaced_unknown(text: str, instead: str) -> str:
    """Return a text with something else in place of what is known only when the script runs."""
    return _UNKNOWN.sub(lambda _: instead, text)


def shown(text: str) -> str:
    """Return a text without the marks."""
    return text.replace(OPEN, "").replace(CLOSE, "")


@dataclass
class State:
    """Variables at one place of a script.

    Attributes:
        variables: those that the script sets, to their texts.
        arrays: those that are arrays, to their items.
        arguments: of the function that runs, or of the script, which has none.
        assumed: variables of the environment that count as not set, because the script has a value for that case.
        exported: names of variables that commands get.
        ended: "exit" or "return" where nothing follows.
    """

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    assumed: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    ended: str = ""

    def branch(self) -> State:
        """Return a copy, which shares only what is assumed and exported."""
        found = copy.copy(self)
        found.variables, found.arrays, found.arguments = dict(self.variables), dict(self.arrays), list(self.arguments)
        return found

    def become(self, others: list[State]) -> None:
        """Go on as one of several states, of which it is not known which; what differs between them is not known."""
        going_on = [state for state in others if not state.ended] or others[:1]
        first = going_on[0]
        for name in {name for state in (self, *going_on) for name in (*state.variables, *state.arrays)}:
            found = [(state.variables.get(name), state.arrays.get(name)) for state in going_on]
            text, items = found[0]
            self.variables.pop(name, None)
            self.arrays.pop(name, None)
            if any(other != found[0] for other in found):
                self.forget(name)
            elif text is not None:
                self.variables[name] = text
            elif items is not None:
                self.arrays[name] = items
        self.ended = first.ended

    def assign(self, name: str, value: str, append: bool = False) -> None:
        if append and name in self.arrays:
            self.forget(name)
            return
        before = self.variables.get(name, unknown("$" + name)) if append else ""
        text = before + value
        self.arrays.pop(name, None)
        self.variables[name] = text if len(text) < _TOO_LONG else unknown("$" + name)

    def forget(self, name: str) -> None:
        """Take note that a variable has a value which is not known."""
        self.arrays.pop(name, None)
        self.variables[name] = unknown("$" + name)

    def change_directory(self) -> None:
        """Take note that $PWD is no longer the directory in which the script was started."""
        self.variables["PWD"] = unknown("$PWD after cd")
        self.exported.add("PWD")

    def fields(self, words: tuple[Word, ...], assume: bool = False) -> list[str]:
        """Return what words become: expanded, and split where an expansion is not quoted.

        Args:
            assume: a variable that only the environment may set counts as not set.
        """
        return [text.translate(_BLANK) for word in words for text in self._fields(word, assume)]

    def text(self, word: Word, assume: bool = False) -> str:
        """Return what a word becomes where it is not split, as in an assignment."""
        return "".join(" ".join(self._items(piece, assume)) for piece in word).translate(_BLANK)

    def pattern(self, word: Word) -> str:
        """Return a word as a pattern, in which quoted letters stand for themselves."""
        return "".join(
            re.sub(r"([*?\[])", r"[\1]", "".join(self._items(piece, True)))
            if piece.quoted
            else "".join(self._items(piece, True))
            for piece in word
        )

    def _fields(self, word: Word, assume: bool) -> list[str]:
        found: list[str] = []
        current: str | None = None
        for piece in word:
            items, edges = self._items(piece, assume), (False, False)
            if piece.kind == "text" and not piece.quoted:
                items = [_BRACES.sub(lambda match: unknown(match[0]), piece.text)]
            elif not piece.quoted:
                if len(word) == 1 and self._is_environment(piece) and not is_known("".join(items)):
                    self.assumed.add(piece.text)
                    continue
                items, edges = _split(items)
                if edges[0] and current is not None:
                    found.append(current)
                    current = None
            if not items:
                continue
            *whole, last = items
            for item in whole:
                found.append((current or "") + item)
                current = None
            current = (current or "") + last
            if edges[1]:
                found.append(current)
                current = None
        return found if current is None else [*found, current]

    def _is_environment(self, piece: Piece) -> bool:
        name = piece.text
        return (
            piece.kind == "parameter" and name.isidentifier() and self._lookup(name) is None and name not in _ALWAYS_SET
        )

    def _items(self, piece: Piece, assume: bool) -> list[str]:
        """Return what a piece becomes: one text, or the items of "${NAME[@]}" and "$@"."""
        if piece.kind == "text":
            return [piece.text]
        if piece.kind == "command":
            moved = self.variables.get("PWD") if piece.source in _WORKING_DIRECTORY else None
            return [moved or unknown(piece.source)]
        if piece.kind == "arithmetic":
            return [self.number(piece.text, piece.source)]
        return self._parameter(piece.text, piece.source, assume)

    def number(self, expression: str, source: str) -> str:
        """Return the value of an expression as text, marked where it is not known."""
        text = self.text(word_of(expression), assume=True)
        found = value_of(text, self._lookup) if is_known(text) else None
        return unknown(source) if found is None else str(found)

    def _lookup(self, name: str) -> str | None:
        """Return the text of a variable that the script sets, or of an argument; None where it sets none."""
        if name.isdigit():
            place = int(name)
            return unknown("$0") if place == 0 else self.arguments[place - 1] if place <= len(self.arguments) else None
        if name == "#":
            return str(len(self.arguments))
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else None
        return self.variables.get(name)

    def _parameter(self, text: str, source: str, assume: bool) -> list[str]:
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return [unknown(source)]
        length, name, index, rest = match.groups()
        if name in ("@", "*") or index in ("@", "*"):
            items = self.arguments if name in ("@", "*") else self.arrays.get(name)
            if items is None and name in self.variables:
                items = [self.variables[name]]
                if length and not is_known(items[0]):  # perhaps an array, as mapfile makes one
                    return [unknown(source)]
            if length and not rest and items is not None:
                return [str(len(items))]
            if rest and not (rest == ":1" and name in ("@", "*")):
                return [unknown(source)]
            return [unknown(source)] if items is None else list(items)
        value = self._lookup(name)
        if index is not None:
            items, place = self.arrays.get(name), self.number(index, index)
            inside = items is not None and is_known(place) and -len(items) <= int(place) < len(items)
            value = items[int(place)] if items is not None and inside else unknown(source)
        if length:
            return [unknown(source)] if rest or value is None or not is_known(value) else [str(len(value))]
        if not rest:
            if value is None and assume and name not in _ALWAYS_SET:
                self.assumed.add(name)
                value = ""
            return [unknown(source) if value is None else value]
        return [self._modified(name, value, rest, source)]

    def _modified(self, name: str, value: str | None, rest: str, source: str) -> str:
        """Return ${NAME...} with what follows the name: a default, an alternative, or a change of the text."""
        operator = re.match(r":[-=+?]|[-=+?]|##?|%%?|//?|,,?|\^\^?", rest)
        if operator is None:
            return unknown(source)
        argument = rest[operator.end() :]
        if operator[0].lstrip(":") in ("-", "=", "+", "?"):
            return self._default(name, value, operator[0], argument, source)
        if value is None or not is_known(value):
            return unknown(source)
        if operator[0] in (",,", "^^"):
            return value.lower() if operator[0] == ",," else value.upper()
        if operator[0] in ("/", "//"):
            pattern, _, new = re.sub(r"\\/", OPEN, argument).partition("/")
            old, text = self.pattern(word_of(pattern.replace(OPEN, "/"))), self.text(word_of(new.replace(OPEN, "/")))
            if not old or any(letter in old for letter in "*?[") or not is_known(old + text):
                return unknown(source)
            return value.replace(old, text) if operator[0] == "//" else value.replace(old, text, 1)
        if operator[0] in ("#", "##", "%", "%%"):
            return _cut(value, operator[0], self.pattern(word_of(argument))) or unknown(source)
        return unknown(source)

    def _default(self, name: str, value: str | None, operator: str, argument: str, source: str) -> str:
        if name in _ALWAYS_SET and value is None:
            return unknown(source)
        if value is not None and operator[0] == ":" and not _UNKNOWN.sub("", value) and value:
            return unknown(source)  # whether it is empty is not known
        missing = value is None or (operator[0] == ":" and not value)
        kind = operator[-1]
        if value is None and not name.isdigit():
            self.assumed.add(name)
        if kind == "+":
            return "" if missing else self.text(word_of(argument))
        if not missing:
            return value or ""
        if kind == "?":
            return unknown(source)
        parts = [(piece, " ".join(self._items(piece, False))) for piece in word_of(argument)]
        found = "".join(text.translate(_WHOLE) if piece.quoted else text for piece, text in parts)
        if kind == "=":
            self.assign(name, found.translate(_BLANK))
        return found


def _split(items: list[str]) -> tuple[list[str], tuple[bool, bool]]:
    """Return texts split at blanks, marked parts whole, and whether blanks stand before and after them."""
    hidden: list[str] = []

    def hide(match: re.Match[str]) -> str:
        hidden.append(match[0])
        return f"{OPEN}{len(hidden) - 1}{CLOSE}"

    text = " ".join(_UNKNOWN.sub(hide, item) for item in items)
    parts = [_UNKNOWN.sub(lambda match: hidden[int(match[0][1:-1])], part) for part in text.split()]
    return parts, (text[:1].isspace(), text[-1:].isspace())


def _cut(value: str, operator: str, pattern: str) -> str | None:
    """Return a text without the shortest or longest part that a pattern matches at one of its ends."""
    if not is_known(pattern):
        return None
    lengths = range(len(value) + 1) if len(operator) == 1 else range(len(value), -1, -1)
    for length in lengths:
        rest, part = (
            (value[length:], value[:length])
            if operator[0] == "#"
            else (value[: len(value) - length], value[len(value) - length :])
        )
        if fnmatchcase(part, pattern):
            return rest
    return value
