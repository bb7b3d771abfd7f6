"""The conditions of a shell script: [ ], [[ ]] and (( )). What depends on the machine that runs it, such as a file, is not known."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from hpcrl.convert.shell.grammar import plain
from hpcrl.convert.shell.lexer import Token, Word
from hpcrl.convert.shell.state import State, is_known

_NUMBERS = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
_WHOLE = re.compile(r"[+-]?\d{1,18}")


def arithmetic(expression: str, state: State) -> bool | None:
    """Return whether (( )) holds; None where that is not known."""
    found = state.number(expression, expression)
    return found != "0" if is_known(found) else None


def bracket(texts: list[str]) -> bool | None:
    """Return whether [ ] holds of texts that are expanded and split, without the brackets; None where that is not known."""
    if texts[:1] == ["!"] and len(texts) > 1:
        return _not(bracket(texts[1:]))
    if len(texts) == 3:
        return _compared(texts[0], texts[1], texts[2], literal=True)
    if len(texts) == 2:
        return _of_one(texts[0], texts[1])
    if len(texts) == 1:
        return bool(texts[0]) if is_known(texts[0]) else None
    return None if texts else False


def double_bracket(tokens: tuple[Token, ...], state: State) -> bool | None:
    """Return whether [[ ]] holds; None where that is not known."""
    tokens = tuple(token for token in tokens if token.operator != "\n")
    try:
        found, rest = _either(tokens, state)
    except IndexError:
        return None
    return None if rest else found


def _either(tokens: tuple[Token, ...], state: State) -> tuple[bool | None, tuple[Token, ...]]:
    found, rest = _both(tokens, state)
    while rest and rest[0].operator == "||":
        other, rest = _both(rest[1:], state)
        found = True if found or other else None if None in (found, other) else False
    return found, rest


def _both(tokens: tuple[Token, ...], state: State) -> tuple[bool | None, tuple[Token, ...]]:
    found, rest = _single(tokens, state)
    while rest and rest[0].operator == "&&":
        other, rest = _single(rest[1:], state)
        found = False if found is False or other is False else None if None in (found, other) else True
    return found, rest


def _single(tokens: tuple[Token, ...], state: State) -> tuple[bool | None, tuple[Token, ...]]:
    first, rest = tokens[0], tokens[1:]
    name = plain(first.word) if not first.operator else None
    if first.operator == "(":
        found, rest = _either(rest, state)
        return found, rest[1:]
    if name == "!":
        found, rest = _single(rest, state)
        return _not(found), rest
    if name == "-v" and rest:
        variable = state.text(rest[0].word)
        state.assumed |= set() if variable in state.variables else {variable}
        return variable in state.variables, rest[1:]
    if name and re.fullmatch(r"-[a-zA-Z]", name) and rest:
        return _of_one(name, state.text(rest[0].word, assume=True)), rest[1:]
    operator = rest[0].operator or plain(rest[0].word) if rest else None
    left = state.text(first.word, assume=True)
    if operator is None or operator in ("&&", "||", ")"):
        return (bool(left) if is_known(left) else None), rest
    return _compared(left, operator, _right(rest[1].word, operator, state), literal=False), rest[2:]


def _right(word: Word, operator: str, state: State) -> str:
    return state.pattern(word) if operator in ("=", "==", "!=") else state.text(word, assume=True)


def _of_one(operator: str, text: str) -> bool | None:
    if operator in ("-z", "-n") and (is_known(text) or len(re.sub("\ue000[^\ue001]*\ue001", "", text))):
        return (operator == "-z") == (text == "")
    return None


def _compared(left: str, operator: str, right: str, literal: bool) -> bool | None:
    if not is_known(left + right):
        return None
    if operator in ("=", "==", "!="):
        equal = left == right if literal else fnmatchcase(left, right)
        return equal == (operator != "!=")
    if operator in _NUMBERS and _WHOLE.fullmatch(left.strip()) and _WHOLE.fullmatch(right.strip()):
        return _NUMBERS[operator](int(left), int(right))
    return None


def _not(found: bool | None) -> bool | None:
    return None if found is None else not found
