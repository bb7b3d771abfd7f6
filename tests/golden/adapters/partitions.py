"""Cosmos-RL's micro-batches by tokens, and the partitions that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.trainer.batching import MicroBatchLimit, RowRef, assign_to_ranks, balanced, split_micro_batches
from tests.golden.case import Case


def micro_batches(case: Case) -> dict[str, Any]:
    (parts,) = split_micro_batches(
        [_refs(case.inputs["seq_len_effective"])], MicroBatchLimit(1, case.params["max_token_len"])
    )
    return {"batches": parts, "index": parts}


def partitions(case: Case) -> dict[str, Any]:
    """Parts in the order of their first samples; ours have an order of their own where all are to have as many samples."""
    lengths, parts = case.inputs["seqlen_list"], case.params["k_partitions"]
    if not case.params["equal_size"]:
        return {"out": sorted(balanced(lengths, parts))}
    return {"out": [sorted(ref.index for ref in share) for share in assign_to_ranks(_refs(lengths), parts)]}


def _refs(lengths: Sequence[int]) -> list[RowRef]:
    return [RowRef(0, index, length) for index, length in enumerate(lengths)]


ADAPTERS = {"rearrange_mini_batches": micro_batches, "get_seqlen_balanced_partitions": partitions}
