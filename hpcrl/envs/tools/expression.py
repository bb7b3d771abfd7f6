"""Arithmetic that a policy has written: + - * / and parentheses, computed exactly and never by eval."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 200
"""Characters of an expression at most; this bounds its depth, and the digits of all it can come to."""

_TYPED = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_CHARACTERS = re.compile(r"[0-9.+\-*/() ]+")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class ExpressionError(ValueError):
    """The text is no expression, or has no value; the message has the reason."""


@dataclass(frozen=True)
class Expression:
    """What was written.

    Attributes:
        value: what it comes to.
        numbers: the numbers in it, from left to right, each as often as it stands there.
    """

    value: Fraction
    numbers: list[Fraction]


def evaluate(text: str) -> Expression:
    """Return the value of an expression of decimal numbers, + - * /, parentheses and minus signs.

    Line breaks count as spaces; ×, ÷ and − are read as * / and -. Powers, // and names are no part of it.

    Raises:
        ExpressionError: it is none, is longer than `LONGEST`, or divides by zero.
    """
    line = " ".join(text.translate(_TYPED).split())
    if len(line) > LONGEST:
        raise ExpressionError(f"longer than {LONGEST} characters")
    if not _CHARACTERS.fullmatch(line):
        raise ExpressionError("expected numbers, + - * / and parentheses")
    try:
        tree = ast.parse(line, mode="eval")
    except SyntaxError as error:
        raise ExpressionError("expected an expression such as 2 * (3 + 4)") from error
    numbers: list[Fraction] = []
    return Expression(_value(tree.body, line, numbers), numbers)


def _value(node: ast.expr, line: str, numbers: list[Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            # as it is written, for Python's own 0.1 is not a tenth
            numbers.append(Fraction(line[node.col_offset : node.end_col_offset]))
            return numbers[-1]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, line, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            values = _value(left, line, numbers), _value(right, line, numbers)
            try:
                return _OPERATIONS[type(op)](*values)
            except ZeroDivisionError as error:
                raise ExpressionError("division by zero") from error
    raise ExpressionError("expected + - * / and parentheses, and nothing else")
