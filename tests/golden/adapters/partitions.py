"""Cosmos-RL's micro-batches by tokens, and the partitions that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.trainer.plan import Limit, Pick, balanced, cut, deal
from tests.golden.cases import Case


def micro_batches(case: Case) -> dict[str, Any]:
    (parts,) = cut([_picks(case.inputs["seq_len_effective"])], Limit(1, case.params["max_token_len"]))
    return {"batches": parts, "index": parts}


def partitions(case: Case) -> dict[str, Any]:
    """Parts in the order of their first samples; ours have an order of their own where all are to have as many samples."""
    lengths, parts = case.inputs["seqlen_list"], case.params["k_partitions"]
    if not case.params["equal_size"]:
        return {"out": sorted(balanced(lengths, parts))}
    return {"out": [sorted(pick.index for pick in share) for share in deal(_picks(lengths), parts, Limit(1))]}


def _picks(lengths: Sequence[int]) -> list[Pick]:
    return [Pick(0, index, length) for index, length in enumerate(lengths)]


ADAPTERS = {"rearrange_mini_batches": micro_batches, "get_seqlen_balanced_partitions": partitions}
