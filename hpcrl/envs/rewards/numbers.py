"""Rewards for final answers that are compared as numbers or as text, without computer algebra."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.answers import after_thought, plain_minus
from hpcrl.envs.rewards.response import Response, ground_truth
from hpcrl.errors import DataError

_FINAL = re.compile(r"#### (?=-?[0-9.,])")
_GROUPED = r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}"  # thousands, or lakhs and crores
_WITH_COMMAS = re.compile(rf"[-+]?{_GROUPED}(?:\.[0-9]*)?")
_NUMBER = re.compile(
    rf"""
    -?(?:(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)
    (?!                                          # what would make these digits the beginning of another value:
        [.,:_]*[0-9]                           | # more of them: 12,34  1.2.3  10:30
        [eE][-+]?[0-9] | [²³½⅓⅔¼¾√π^]          | # 1e3  5²  5½  5π
        [^\S\n]*[-+*/×÷·–]+[^\S\n]*[0-9(\\]   | # 42/7  42 * 7
        [^\S\n]+[0-9]                          | # 42 1/2
        [^\S\n]*\\(?!text|mathrm)[a-zA-Z]       # 5\frac{1}{2}
    )
    """,
    re.VERBOSE,
)
_ANSWER = re.compile(r"answer\s*:", re.IGNORECASE)
_LONGEST_ANSWER = (
    1000  # characters; what brings an answer into normal form takes time that grows with the square of its length
)

# What Minerva's normalization takes out of an answer (arXiv:2206.14858, appendix): articles, units, spaces and their remains.
_ARTICLES_AND_SPACES = re.compile(r"an |a |\\\$|\\ | ")
_AND = re.compile(r",?\\text\{and\}")
_UNITS = re.compile(
    "square|ways|integers|dollars|mph|inches|hours|km|units|sue|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|meters|"
    "meals|edges|students|childrentickets|multiples"
)
_REMAINS = re.compile(
    r'\\l?dots|\\text\{(?:m|s|\.|\n|\ns)?\}(?:\^[23])?|\\mathrm\{th\}|\^\\circ|\^\{\\circ\}|\\;|,\\!|\{,\}|"'
)
_FIRST_FORMULA = re.compile(r".*?\$([^$\n]*)\$.*")
_WRAPPED = re.compile(r"\\(?:text|textbf|overline)\{(.*?)\}")
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def gsm8k(response: Response, _environment: EnvironmentConfig) -> float:
    """Return 1 if the number after the first `####` behind </think> is the ground truth, else 0 (GSM8K, arXiv:2110.14168).

    Numbers are compared exactly, whatever their thousands separators, trailing zeros, a unit and the full stop of a sentence. The ground
    truth is a number, or a text with one after `#### `, such as the column `answer` of GSM8K.

    Formula:
        1 if the number after `####` is that of the ground truth
    Use:
        GSM8K
    Raises:
        DataError: the row has no ground truth, or there is no number in it.
    """
    return float(final_number(response.text) == expected_number(response.ground_truth))


def expected_number(truth: Any) -> Decimal:
    """Return the number that gsm8k expects. Raises DataError where the ground truth is missing or has no number."""
    text = ground_truth(truth).strip()
    expected = final_number(text)
    if expected is None:
        expected = number(text)
    if expected is None:
        raise DataError(f"expected a number as ground truth, or a text with one after `#### `, found {text!r:.80}")
    return expected


def direct_math(response: Response, _environment: EnvironmentConfig) -> float:
    """Return 1 if the ground truth is what follows the last `Answer:`, else -1 (DAPO, arXiv:2503.14476).

    `Answer:` may stand anywhere in a line behind </think>, in any letter case; one that no text follows does not count. The answer ends
    with its line. Both sides are brought into Minerva's normal form (arXiv:2206.14858) and compared as texts. An answer of more
    than 1000 characters is wrong.

    Formula:
        1 or -1, by the last line that begins with `Answer:`
    Use:
        the prompts of DAPO's dataset
    Raises:
        DataError: the row has no ground truth, or one of which the normal form leaves nothing, or of more than 1000 characters.
    """
    expected = expected_form(response.ground_truth)
    answer = _last_answer(response.text)
    return 1.0 if len(answer) <= _LONGEST_ANSWER and normal_form(answer) == expected else -1.0


def expected_form(truth: Any) -> str:
    """Return the normal form that direct_math expects. Raises DataError where the ground truth is missing, too long, or has an empty normal form."""
    text = ground_truth(truth)
    if len(text) > _LONGEST_ANSWER:
        raise DataError(
            f"expected a ground truth of at most {_LONGEST_ANSWER} characters, found {len(text)}: {text!r:.80}"
        )
    expected = normal_form(text)
    if not expected:
        raise DataError(
            f"expected an answer as ground truth; without units, articles and LaTeX nothing is left of {text!r}"
        )
    return expected


def normal_form(answer: str) -> str:
    r"""Return an answer without units, articles, spaces and the marks of LaTeX, with \frac and \sqrt written out in full."""
    text = plain_minus(answer).rpartition("=")[2].replace(".$", "$").replace("mbox", "text")
    text = _AND.sub(",", _ARTICLES_AND_SPACES.sub("", text))
    text = _REMAINS.sub("", _UNITS.sub("", text))
    text = _FIRST_FORMULA.sub(r"$\1$", text)
    text = _BOXED.sub(r"\1", _WRAPPED.sub(r"\1", text))
    text = _SHORT_ROOT.sub(r"sqrt{\1}", _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)).replace("$", "")
    plain = text.replace(",", "")
    return (plain if plain.isdigit() and (plain == text or _WITH_COMMAS.fullmatch(text)) else text).strip()


def _last_answer(text: str) -> str:
    """Return the line behind the last `Answer:` that text follows, thoughts left out; empty where there is none."""
    text = after_thought(text)
    for end in reversed([found.end() for found in _ANSWER.finditer(text)]):
        if said := text[end:].lstrip():
            return said.partition("\n")[0]
    return ""


def final_number(text: str) -> Decimal | None:
    """Return the number after the first `#### ` behind a thought; None where there is none, or where another value begins with it.

    A unit may follow, such as `%` or ` apples`; `42/7`, `12,34` and `5 1/2` are no numbers.
    """
    answer = plain_minus(after_thought(text))
    mark = _FINAL.search(answer)
    found = mark and _NUMBER.match(answer, mark.end())
    return number(found[0]) if found else None


def number(text: str) -> Decimal | None:
    """Return the number that a text is, with or without thousands separators and a full stop; None where it is none."""
    text = plain_minus(text)
    if "," in text and not _WITH_COMMAS.fullmatch(text):
        return None
    try:
        found = Decimal(text.replace(",", "").removesuffix("."))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None
