"""Finds the answer in a response: behind its thoughts, and in its last box."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINED = re.compile(r"[\s$]*(?:,|,?\s*(?:and|or|\\text\{\s*(?:and|or)\s*\}))[\s$]*")
_DELIMITED = re.compile(
    r"(?<!\\)(\$\$?)((?:[^$\\]|\\.)+)\1|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]", re.DOTALL
)
_MINUS = "\N{MINUS SIGN}"
_SIGNS = str.maketrans({
    "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "∞": r"\infty ",
    "€": r"\$", "£": r"\$",
})  # fmt: skip
_ROOT = re.compile(r"√\s*(\d+|[a-z])")
# 10 000, with one of LaTeX's spaces or a plain one
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;: ]|[~\s])\d{3})+(?![\d,])")
_MIXED = re.compile(r"(?<![\d./])(\d+)\s+(\d+)/(\d+)")
_NUMBER_OF = re.compile(
    r"(.*[\d}])\s+((?!and|or|mod|sin|cos|tan|log|exp)[a-z]{3,}(?:\s+[a-z]+)*)\.?", re.IGNORECASE | re.DOTALL
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


def plain_minus(text: str) -> str:
    """Return a text with the minus sign of typesetters as the one of keyboards."""
    return text.replace(_MINUS, "-")


def as_latex(formula: str) -> str:
    """Return a formula as LaTeX: signs of Unicode as commands, `10 000` and `1 1/2` as one number, and words behind a number as text, its unit."""
    text = _ROOT.sub(r"\\sqrt{\1}", plain_minus(formula).replace(r"\degree", "°")).translate(_SIGNS)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _GROUPS.sub(lambda found: re.sub(r"\D", "", found[0]), text))
    counted = _NUMBER_OF.fullmatch(text.strip())
    return f"{counted[1]}\\text{{ {counted[2]}}}" if counted else text


def _closing(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the one before `start`; None where nothing does."""
    depth = 1
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return found.start()
    return None
