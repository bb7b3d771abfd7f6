"""Cosmos-RL's search for what the completions of a group have in common."""

from __future__ import annotations

from typing import Any

from hpcrl.algorithms.prefixes import maximal_prefixes
from tests.golden.cases import Case


def groups(case: Case) -> dict[str, Any]:
    """Without a number of tokens nothing is searched for."""
    responses, least = case.inputs["seqs"], case.params["N"]
    found = [] if least is None else maximal_prefixes(responses, least)
    return {"groups": [[responses[members[0]][:length], members] for length, members in found]}


ADAPTERS = {"find_maximal_prefix_groups": groups}
