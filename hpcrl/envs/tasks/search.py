"""A question that the policy answers with the help of a search engine (Search-R1, arXiv:2503.09516)."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from typing import Any

from hpcrl.config.sections.environment import SearchConfig
from hpcrl.envs.base import Environment, Turn
from hpcrl.envs.rewards.response import truth_of
from hpcrl.envs.rewards.tags import first_block
from hpcrl.envs.tools.columns import lacking
from hpcrl.envs.tools.retrieve import retriever, shown

CHARACTERS = 8000
"""What one search shows at most."""

LONGEST_QUERY = 1000
"""Characters of a query; what is longer is cut."""

_FORM = "Search by <search>…</search>, or give your answer as <answer>…</answer>."
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Search(Environment):
    """Answer a question with the help of a search engine.

    Several turns. Reward 1 if what <answer> holds is one of the right answers, otherwise 0.

    Letter case, punctuation, articles and white space do not count (exact match of SQuAD, arXiv:1606.05250).

    Args:
        extras: `reward_spec.ground_truth` is the right answer, a list of them, or a table with them as `target`.

    Raises:
        DataError: the row has no answer.
    """

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._config: SearchConfig = extras["skyrl_gym"].search
        truth = truth_of(extras)
        self._answers = {key: answer for answer in _answers(truth) if (key := normal(answer))}
        if not self._answers:
            raise lacking("search", "reward_spec", "one or more answers as `ground_truth`", truth)
        self._left: int = extras["max_turns"]
        self._searches = 0

    def solution(self) -> str | None:
        return f"<answer>{next(iter(self._answers.values()))}</answer>"

    def state(self) -> str | None:
        return json.dumps([self._left, self._searches])

    def resume(self, state: str) -> None:
        self._left, self._searches = json.loads(state)

    def step(self, action: str) -> Turn:
        self._left -= 1
        block = first_block(action, ("search", "answer"))
        if block and block[0] == "answer":
            return self._end(normal(block[1]) in self._answers, answered=True)
        if self._left <= 0:
            return self._end(False, answered=False)
        said = f"<information>\n{self._found(block[1])}\n</information>" if block else _FORM
        return Turn([{"role": "user", "content": said}], 0.0, done=False, metrics={"searches": float(self._searches)})

    def _end(self, right: bool, answered: bool) -> Turn:
        metrics = {"searches": float(self._searches), "answered": float(answered)}
        return Turn([], float(right), done=True, metrics=metrics)

    def _found(self, query: str) -> str:
        self._searches += 1
        query = query.strip()[:LONGEST_QUERY]
        texts = retriever(self._config).find(query, self._config.topk) if query else []
        if self._config.log_requests:
            print(f"search: {query!r}: {len(texts)} documents", flush=True)
        return shown(texts, CHARACTERS) if texts else "No document was found."


def normal(answer: str) -> str:
    """Return an answer in the form in which answers are compared."""
    plain = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())


def _answers(truth: Any) -> list[str]:
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    found = truth if isinstance(truth, list | tuple) else [truth]
    return [str(answer) for answer in found if isinstance(answer, str | int | float)]
