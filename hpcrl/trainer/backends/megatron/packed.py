"""Packed micro-batches for Megatron-core's layers: cut for context parallelism, padded to equal parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from hpcrl.config.rules.megatron_groups import padded
from hpcrl.trainer.backends.megatron.process_groups import context_group, tensor_group
from hpcrl.trainer.models.experts.balance import Samples
from hpcrl.trainer.models.packed.attention import PackedSequences
from hpcrl.types import MicroBatch, to_device


@dataclass(frozen=True)
class RoutedTokens:
    """Router inputs of a rank: N tokens, padding included.

    Attributes:
        given: [N, L, k] int64, as of `given_experts`; None: nowhere.
        samples: None where nothing is learned of routers.
    """

    given: torch.Tensor | None
    samples: Samples | None


@dataclass
class Packing(PackedSeqParams):
    """Positions of the samples of a micro-batch among the ranks that share its tokens.

    Of C ranks of a context parallel group, rank r has parts r and 2C - 1 - r of each sample. The sample is padded on its right to 2C equal
    parts, so that attention costs each rank the same. Padding behind the last sample is a sample of its own.

    Attributes:
        own: [P_own] int64, places of this rank's tokens in the padded micro-batch.
        order: [P_padded] int64, for each place of the padded micro-batch where it lies when all ranks' tokens are laid end to end.
        kept: [P] int64, places of the tokens that are no padding.
        sequences: the padded samples.
        own_rows: [R] int64, those of this rank's tokens that the head computes anything of, as of MicroBatch.
        own_mask: [R, K] int32, their sampling masks, as of MicroBatch; None without one.
        own_ids: [R, K] int32, their teacher_ids, as of MicroBatch; None without these.
        top_k: as of MicroBatch.
        routed: None: routers do as they are.
    """

    own: torch.Tensor | None = None
    order: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    sequences: PackedSequences | None = None
    own_rows: torch.Tensor | None = None
    own_mask: torch.Tensor | None = None
    own_ids: torch.Tensor | None = None
    top_k: int = 0
    routed: RoutedTokens | None = None

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device, least: int = 0) -> Packing:
        """Return that of a micro-batch, on `device`.

        Args:
            batch: on the CPU, so that nothing waits for the device.
            least: tokens to which the whole is padded at least.
        """
        ranks, rank = context_group().size(), context_group().rank()
        parts = _parts(ranks)
        lengths = [padded(length, parts) for length in batch.lengths]
        rest = max(padded_total(batch.lengths), least) - sum(lengths)
        lengths += [rest] if rest else []
        starts = torch.tensor([0, *lengths]).cumsum(0)
        shares = [_share(lengths, starts, parts, each) for each in range(ranks)]
        order = torch.cat(shares).argsort()
        kept = torch.cat(
            [torch.arange(length) + start for length, start in zip(batch.lengths, starts.tolist(), strict=False)]
        )
        counts = torch.zeros(len(order)).index_fill_(0, kept[batch.head_rows], 1)
        own_rows = counts[shares[rank]].nonzero()[:, 0]
        bounds, longest = to_device(starts.int(), device), max(lengths)
        packing = cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            cp_group=context_group(),
            own=to_device(shares[rank], device),
            order=to_device(order, device),
            kept=to_device(kept, device),
            sequences=PackedSequences.of(lengths, bounds),
            own_rows=to_device(own_rows, device),
        )

        def own(ids_PK: torch.Tensor | None) -> torch.Tensor | None:
            if ids_PK is None:
                return None
            padded_PK = ids_PK.new_full((len(order), ids_PK.shape[1]), -1).index_copy_(0, kept, ids_PK)
            return to_device(padded_PK[shares[rank][own_rows]], device)

        packing.own_mask, packing.own_ids, packing.top_k = own(batch.sampling_mask), own(batch.teacher_ids), batch.top_k
        return packing

    def share(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [P_own, ...] of values [P, ...], with zeros for padding."""
        assert self.own is not None
        assert self.order is not None
        assert self.kept is not None
        return values_P.new_zeros(len(self.order), *values_P.shape[1:]).index_copy(0, self.kept, values_P)[self.own]

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return [P, ...] from each rank's tokens [P_own, ...], the same on all ranks."""
        assert self.order is not None
        assert self.kept is not None
        if context_group().size() > 1:
            values = gather_from_sequence_parallel_region(values, False, self.cp_group)
        return values[self.order[self.kept]]


def padded_total(lengths: list[int]) -> int:
    """Return the tokens of a micro-batch that all ranks which share it can have equal parts of."""
    ranks, tensor = context_group().size(), tensor_group().size()
    parts = _parts(ranks)
    return padded(sum(padded(length, parts) for length in lengths), math.lcm(parts, ranks * tensor))


def _parts(ranks: int) -> int:
    return 2 * ranks if ranks > 1 else 1


def _share(lengths: list[int], starts: torch.Tensor, parts: int, rank: int) -> torch.Tensor:
    if parts == 1:
        return torch.arange(sum(lengths))
    pieces = []
    for length, start in zip(lengths, starts.tolist(), strict=False):
        size = length // parts
        pieces += [torch.arange(size) + start + part * size for part in (rank, parts - 1 - rank)]
    return torch.cat(pieces)
