"""Two ways to find documents: a retrieval service over HTTP, and BM25 over a file in the process itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from hpcrl.config.sections.environment import SearchConfig
from hpcrl.envs.tools.http import ToolService
from hpcrl.errors import DataError, HpcrlError
from hpcrl.text import utf8

_PATIENCE_S = 60.0
_LOADING = threading.Lock()


class Retriever(Protocol):
    def find(self, query: str, topk: int) -> list[str]:
        """Return the texts of at most `topk` documents, the best first. Raises HpcrlError where it cannot."""
        ...


def retriever(config: SearchConfig) -> Retriever:
    """Return what the settings name; a corpus is read once per process.

    Raises:
        ConfigError: search_url is no address.
        DataError: the corpus cannot be read.
        HpcrlError: bm25s is not installed.
    """
    if config.corpus is None:
        return _Http(config.search_url, config.timeout)
    with _LOADING:
        return _corpus(config.corpus)


class _Http:
    def __init__(self, url: str, timeout_s: float) -> None:
        name = "search service (environment.skyrl_gym.search.search_url)"
        self._service = ToolService(name, url, timeout_s, _PATIENCE_S)

    def find(self, query: str, topk: int) -> list[str]:
        answer = self._service.post(json={"queries": [query], "topk": topk, "return_scores": True})
        try:
            (found,) = answer["result"]
            return [document_text(item.get("document", item)) for item in found[:topk]]
        except (AttributeError, DataError, KeyError, TypeError, ValueError) as error:
            form = '{"result": [[{"document": {"contents": …}, "score": …}, …]]} with one list per query'
            raise self._service.unusable(form, answer) from error


class Corpus:
    """Documents in memory, ranked by BM25 (Robertson and Zaragoza, 2009) in the form that bm25s calls "lucene": k1 1.5, b 0.75.

    Args:
        path: JSON lines, each with `contents`, or with `text` and perhaps a `title`.

    Raises:
        DataError: the file is missing or empty, or a line of it is no document.
        HpcrlError: bm25s is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise HpcrlError("searching a corpus takes bm25s: pip install 'hpcrl[job]'") from error
        self._texts, self._bm25s = _read(path), bm25s
        self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        self._index.index(bm25s.tokenize(self._texts, stopwords="en", show_progress=False), show_progress=False)

    def find(self, query: str, topk: int) -> list[str]:
        """Return the texts of at most `topk` documents that share a word with the query, the best first."""
        (words,) = self._bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        if not words:
            return []
        scores = self._index.get_scores(words)
        best = (-scores).argsort(kind="stable")[:topk]  # documents of the same score in the order of the file
        return [self._texts[number] for number in best if scores[number] > 0]


@cache
def _corpus(path: str) -> Corpus:
    return Corpus(Path(path))


def _read(path: Path) -> list[str]:
    texts = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    texts.append(_document(line, path, number))
    except OSError as error:
        raise DataError(f"environment.skyrl_gym.search.corpus: cannot read {path}: {error}") from error
    if not texts:
        raise DataError(f"environment.skyrl_gym.search.corpus: {path} has no documents")
    return texts


def _document(line: bytes, path: Path, number: int) -> str:
    try:
        return document_text(json.loads(utf8(line)))
    except (DataError, ValueError) as error:
        raise DataError(f"environment.skyrl_gym.search.corpus: line {number} of {path}: {error}") from error


def document_text(document: Any) -> str:
    """Return a document's text, with its title, if there is one, as the first line. Raises DataError where it is none."""
    if isinstance(document, dict):
        if isinstance(contents := document.get("contents"), str):
            return contents
        if isinstance(text := document.get("text"), str):
            title = document.get("title")
            return f"{title}\n{text}" if isinstance(title, str) and title else text
    raise DataError(
        f"expected a document with `contents`, or with `text` and perhaps a `title`, found {document!r:.80}"
    )


def shown(texts: Sequence[str], most_characters: int) -> str:
    """Return documents as the policy sees them, each cut to its share of the characters."""
    share = most_characters // max(1, len(texts))
    parts = [text if len(text) <= share else f"{text[:share]}…" for text in texts]
    return "\n\n".join(f"Doc {number}: {text}" for number, text in enumerate(parts, 1))
