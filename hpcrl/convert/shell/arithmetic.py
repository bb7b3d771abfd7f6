"""The shell's arithmetic on whole numbers: $((1024 * 4)), and comparisons of [[ ]] and (( ))."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_LONGEST = 200
_BITS = 2**63
_OF_C = {"&&": " and ", "||": " or "}


def _quotient(left: int, right: int) -> int:
    """Return the quotient rounded towards 0, as the shell does."""
    found = abs(left) // abs(right)
    return found if (left < 0) == (right < 0) else -found


_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Pow: lambda left, right: left**right if 0 <= right < 64 else _BITS,
    ast.LShift: lambda left, right: left << right if 0 <= right < 64 else _BITS,
    ast.RShift: lambda left, right: left >> right if 0 <= right < 64 else _BITS,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def value_of(expression: str, variable: Callable[[str], str | None]) -> int | None:
    """Return the value of an expression of whole numbers; None where it has something else in it, or does not fit 64 bits.

    Args:
        variable: the text of a variable; None where it is not known.
    """
    for theirs, ours in _OF_C.items():
        expression = expression.replace(theirs, ours)
    expression = re.sub(r"!(?!=)", " not ", expression)
    if len(expression) > _LONGEST:
        return None
    try:
        return _number(ast.parse(expression.strip(), mode="eval").body, variable)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr, variable: Callable[[str], str | None]) -> int | None:
    found: int | None = None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.Name):
        text = variable(node.id)
        found = int(text) if text is not None and re.fullmatch(r"-?(0|[1-9]\d*)", text) else None
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd | ast.Not):
        inner = _number(node.operand, variable)
        signed = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}[type(node.op)]
        found = None if inner is None else int(signed(inner))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        found = _both(node.left, type(node.op), node.right, variable)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BINARY:
        found = _both(node.left, type(node.ops[0]), node.comparators[0], variable)
    elif isinstance(node, ast.BoolOp):
        parts = [_number(value, variable) for value in node.values]
        together = all if isinstance(node.op, ast.And) else any
        found = None if None in parts else int(together(parts))
    return found if found is not None and -_BITS <= found < _BITS else None


def _both(left: ast.expr, kind: type, right: ast.expr, variable: Callable[[str], str | None]) -> int | None:
    first, second = _number(left, variable), _number(right, variable)
    return None if first is None or second is None else int(_BINARY[kind](first, second))
