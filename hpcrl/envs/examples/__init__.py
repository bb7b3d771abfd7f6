"""A few rows for each environment, to look at it with `hpcrl env try` and to see which columns it wants."""

from __future__ import annotations

from pathlib import Path


def rows_of(environment: str) -> Path:
    """Return where the example rows of an environment of hpcrl are."""
    return Path(__file__).parent / f"{environment}.jsonl"


CORPUS = Path(__file__).parent / "search_corpus.jsonl"
"""Fifty documents, which answer the example rows of search."""
