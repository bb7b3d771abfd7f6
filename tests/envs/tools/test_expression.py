"""Arithmetic of a policy is computed exactly, quickly, and is nothing but arithmetic."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from hpcrl.envs.tools.expression import LONGEST, ExpressionError, evaluate


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, [7]),
        ("2 + 3 * 4", 14, [2, 3, 4]),
        ("(2+3)*4", 20, [2, 3, 4]),
        ("7 - 2 - 1", 4, [7, 2, 1]),
        ("1 / 3 * 3", 1, [1, 3, 3]),
        ("0.1 + 0.2", Fraction(3, 10), [Fraction(1, 10), Fraction(1, 5)]),
        (".5 + 3.", Fraction(7, 2), [Fraction(1, 2), 3]),
        ("-0", 0, [0]),
        ("-3 - -3", 0, [3, 3]),
        ("2 × 6 ÷ 4 − 1", 2, [2, 6, 4, 1]),
        (" (1\n+\t2) ", 3, [1, 2]),
        ("9" * 100 + "*" + "9" * 99, int("9" * 100) * int("9" * 99), [int("9" * 100), int("9" * 99)]),
    ],
)
def test_value_and_numbers(text: str, value: Fraction, numbers: list[Fraction]) -> None:
    found = evaluate(text)
    assert (found.value, found.numbers) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "()",
        "1 +",
        "1 2",
        "1,000",
        "1_000",
        "007",
        "0x10",
        "1e9",
        "1e999999999",
        "9**9**9",
        "7 // 2",
        "7 % 2",
        "+7",
        "2(3)",
        "(1)(2)",
        "1 = 1",
        "3 + 4 = 7",
        "1 < 2",
        "...",
        "1.2.3",
        "a + 1",
        "True",
        "𝟜 + ４",
        "1\x00",
        "1;2",
        "1 # 2",
        "'1'",
        "[1][0]",
        "__import__('os').system('true')",
        "\ud800",
    ],
)
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError, match="expected"):
        evaluate(text)


@pytest.mark.parametrize("text", ["1/0", "1/(2-2)", "0/0", "1/-0"])
def test_division_by_zero(text: str) -> None:
    with pytest.raises(ExpressionError, match="division by zero"):
        evaluate(text)


HALF = LONGEST // 2 - 1


@pytest.mark.parametrize(
    "text",
    [
        "(" * HALF + "1" + ")" * HALF,
        "-" * (LONGEST - 1) + "1",
        "1" + "+1" * HALF,
        "9" * 20 + ("*" + "9" * 20) * 8,
        "1/" * HALF + "3",
    ],
)
def test_the_longest_ones_take_no_time(text: str) -> None:
    started = time.process_time()
    assert isinstance(evaluate(text).value, Fraction)
    assert time.process_time() - started < 0.5
    with pytest.raises(ExpressionError, match="longer than"):
        evaluate(f"1+{text}".ljust(LONGEST + 1, "1"))


@pytest.mark.parametrize("text", ["(" * LONGEST, "(" * 10**6, "9" * 10**6, "-" * LONGEST])
def test_what_is_deep_or_long_breaks_nothing(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)
