"""Pages, docstrings, errors and help: sentences of at most 30 words, words of the field, short lines of the changelog."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens

import pytest

from tests.paths import ROOT
from tests.test_docs import WRITTEN, name_of

MOST_WORDS = 30
MOST_WORDS_OF_A_CHANGE = 20
_PRIVATE = re.compile(
    r"\b(?:told|said|speaks|anew|apart|whoever|that which)\b|\bwhat (?:\w+ ){1,4}is,? is\b", re.IGNORECASE
)
_NAMES = r"(?:\w+, )*\w+(?:: |_| and \w+ are )"
"""What a sentence may begin with in small letters: values that it explains, and names with an underscore."""
PAGES = [*WRITTEN, ROOT / "docs" / "config" / "library.md"]

MODULES = [name_of(path) for path in sorted([*(ROOT / "hpcrl").rglob("*.py"), *(ROOT / "jobs").glob("*.py")])]
_NO_PROSE = {"hpcrl/envs/rewards/numbers.py", "hpcrl/envs/sandbox/seccomp.py", "hpcrl/envs/simulators/arm.py"}
"""Modules with a pattern, a table or a scene in a string, whose length is not that of a sentence."""


def prose(text: str) -> Iterator[str]:
    """Yield paragraphs, points of lists and cells of tables without formulas, a piece of code or a link as one word."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"(`+).+?\1", "Code", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)", text):
        if not block.lstrip().startswith("|"):
            yield block.lstrip("-*# ")
        else:
            yield from (cell for cell in block.split("|") if not re.search(r"[πσΣ²]", cell))


def sentences(text: str) -> Iterator[str]:
    for piece in prose(text):
        for sentence in re.split(rf"(?<=[.!?])[)\"*]*\s+(?=[^a-z]|{_NAMES})|:\n", piece):
            yield " ".join(sentence.split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    found = [one for one in sentences(page.read_text(encoding="utf-8")) if len(one.split()) > MOST_WORDS]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_are_those_of_the_field(page: Path) -> None:
    found = [one for one in sentences(page.read_text(encoding="utf-8")) if _PRIVATE.search(one)]
    assert found == []


def _sentences_of_docstring(text: str) -> Iterator[str]:
    """Yield sentences; a row of a table and an entry of `Attributes:` are paragraphs, what they explain is no word."""
    lines = re.sub(r"^ +(?=\S)", "\t", inspect.cleandoc(text), flags=re.MULTILINE)
    names = r"^\t?\S.*?\S {2,}(?=\S)|^\t\**\w+(?:, \**\w+)*:(?= |$)|^\w+:$"
    text = re.sub(names, "\n\n", lines, flags=re.MULTILINE).replace("\t", "")
    yield from (one for one in sentences(text) if one)


class _English(ast.NodeVisitor):
    """Collect the sentences of a module: docstrings, and strings of errors, help and tables, each value of an f-string as one word."""

    def __init__(self) -> None:
        self.docstrings: list[str] = []
        self.strings: list[str] = []

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            self.docstrings += _sentences_of_docstring(node.value.value)
        else:
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._add("".join(str(one.value) if isinstance(one, ast.Constant) else "X" for one in node.values))
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                self.visit(one.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add(node.value)

    def _add(self, text: str) -> None:
        self.strings += [one for one in sentences(text) if " " in one]


def test_code_has_short_sentences_with_words_of_the_field() -> None:
    long, private = list[tuple[str, str]](), list[tuple[str, str]]()
    for module in MODULES:
        code = (ROOT / module).read_text(encoding="utf-8")
        english = _English()
        english.visit(ast.parse(code))
        comments = [token.string for token in generate_tokens(StringIO(code).readline) if token.type == COMMENT]
        counted = english.docstrings if module in _NO_PROSE else [*english.docstrings, *english.strings]
        long += [(module, one) for one in counted if len(one.split()) > MOST_WORDS]
        texts = [*english.docstrings, *english.strings, *comments]
        private += [(module, one) for one in texts if _PRIVATE.search(one)]
    assert long == []
    assert private == []


def test_what_counts_as_a_sentence_of_code() -> None:
    english = _English()
    english.visit(ast.parse(
        'def f(x):\n    """One two. Three `a b c` five.\n\n    Args:\n        x: six\n            seven. Eight.\n\n        *.y  nine ten\n    """\n'
        '    raise ValueError(f"eleven {g(f\'a {x}\')} thirteen. " "Fourteen fifteen", key)\n'
    ))  # fmt: skip
    assert english.docstrings == ["One two.", "Three Code five.", "six seven.", "Eight.", "nine ten"]
    assert english.strings == ["eleven X thirteen.", "Fourteen fifteen", "a X"]


def test_a_change_is_one_short_line() -> None:
    lines = [line[2:] for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line[:2] == "- "]
    assert len(lines) > 100
    assert [line for line in lines if len(line.split()) > MOST_WORDS_OF_A_CHANGE] == []


def test_what_counts_as_a_sentence() -> None:
    text = "One `a b. c` two.\nThree [x y](z.md) four. Five\n\n- six\n- seven eight\n| nine ten | eleven. Twelve |\n```\nno\n```\n"
    counts = [len(one.split()) for one in sentences(text) if one]
    assert counts == [3, 4, 1, 1, 2, 2, 1, 1]
    assert _PRIVATE.search("what a rank has is, is read")
    assert not _PRIVATE.search("what a rank has")
