"""Pages written by hand: sentences of at most 30 words, words of the field, and short lines of the changelog."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.test_docs import WRITTEN, name_of

MOST_WORDS = 30
MOST_WORDS_OF_A_CHANGE = 20
_PRIVATE = re.compile(
    r"\b(?:told|said|speaks|anew|apart|whoever|that which)\b|\bwhat (?:\w+ ){1,4}is,? is\b", re.IGNORECASE
)
_LEFT: set[str] = {
    "docs/gpu.md",
}
"""Pages that are not yet cleaned."""
_WRITTEN = [*WRITTEN, ROOT / "docs" / "config" / "library.md"]
PAGES = [page for page in _WRITTEN if name_of(page) not in _LEFT]


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
        for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+(?=[^a-z])|:\n", piece):
            yield " ".join(sentence.split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    found = [one for one in sentences(page.read_text(encoding="utf-8")) if len(one.split()) > MOST_WORDS]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_are_those_of_the_field(page: Path) -> None:
    found = [one for one in sentences(page.read_text(encoding="utf-8")) if _PRIVATE.search(one)]
    assert found == []


@pytest.mark.parametrize("page", sorted(_LEFT))
def test_pages_that_are_left_are_not_clean(page: str) -> None:
    assert any(len(one.split()) > MOST_WORDS for one in sentences((ROOT / page).read_text(encoding="utf-8")))


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
