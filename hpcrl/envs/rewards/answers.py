"""Finds the answer in a response: behind its thoughts, and in its last box."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINED = re.compile(r"[\s$]*(?:,|,?\s*(?:and|or|\\text\{\s*(?:and|or)\s*\}))[\s$]*")
_DELIMITED = re.compile(
    r"(?<!\\)(\$\$?)((?:[^$\\]|\\.)+)\1|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]", re.DOTALL
)
_THOUGHT, _THOUGHT_END = "<think>", "</think>"


def after_thought(text: str) -> str:
    """Return the text behind the last </think>, the whole text where there is none; a thought that does not end is left out."""
    return text.rpartition(_THOUGHT_END)[2].partition(_THOUGHT)[0]


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{…}; None where there is no box, "" where the last one does not end.

    Boxes that only `,`, `and` or `or` joins are one answer: the content of all of them, joined by commas.
    """
    starts = list(_BOX.finditer(text))
    contents, after = list[str](), len(text)
    for start in reversed(starts):
        end = _closing(text, start.end())
        if end is None or (contents and not _JOINED.fullmatch(text, end + 1, max(after, end + 1))):
            break
        contents.insert(0, text[start.end() : end])
        after = start.start()
    return ", ".join(contents) if starts else None


def formula_of(truth: str) -> str | None:
    r"""Return the formula that a ground truth is: the content of its last box, of the $…$, \(…\) or \[…\] around it, or all of it.

    None: it is a text in which formulas stand.
    """
    if (box := last_box(truth)) is not None:
        return box
    if whole := _DELIMITED.fullmatch(truth.strip()):
        return next(filter(None, whole.groups()[1:]))
    return None if _DELIMITED.search(truth) else truth


def _closing(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the one before `start`; None where nothing does."""
    depth = 1
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return found.start()
    return None
