"""Micro-batches through the pipeline's stages, forward or forward and backward, by Megatron-core's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from hpcrl.trainer.backends.base import MicroBatches, Objective, merge
from hpcrl.trainer.backends.megatron.experts.routing import MegatronRouting
from hpcrl.trainer.backends.megatron.packed import Packing, padded_total
from hpcrl.trainer.backends.megatron.process_groups import pipeline_group
from hpcrl.trainer.distributed import World, broadcast_json
from hpcrl.trainer.packing import idle_micro_batch
from hpcrl.types import MicroBatch

Result = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""Maps (micro-batch, model outputs [K, P]) to the loss to differentiate and the result that is kept."""


class Pipeline:
    """The stages of a model as one callable. All ranks call it.

    Args:
        chunks: this rank's stage, or its parts with an interleaved schedule.
        data: the ranks that train other samples.
        dynamic: micro-batches that are in the pipeline at the same time may have different lengths; otherwise they are padded.
        routing: None: routers do as they are.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], data: World, *, dynamic: bool, routing: MegatronRouting | None = None
    ) -> None:
        self._chunks, self._data, self._dynamic, self._routing = list(chunks), data, dynamic, routing
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        config: Any = self._chunks[0].config
        # this way of bringing tokens to experts takes it that all ranks which share experts have equally many
        self._even = config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "allgather"

    def train(self, batches: MicroBatches, objective: Objective) -> dict[str, torch.Tensor]:
        """Compute the gradient of a mini-batch, summed over all ranks; return this share's metrics, the same on every stage."""
        # Megatron-core divides by the micro-batches and averages over the ranks; the weights of an objective are a share of the whole
        scale = self._count(len(batches)) * self._data.size

        def result(batch: MicroBatch, values_KP: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, sums = objective(batch, *values_KP[:2], *([values_KP[2:].T] if len(values_KP) > 2 else []))
            return loss * scale, sums

        totals: dict[str, torch.Tensor] = {}
        for sums in self._run(batches, result, backward=True):
            merge(totals, sums)
        return totals if self._stages == 1 else self._from_last_stage(totals)

    def first_output(
        self,
        batches: MicroBatches,
        of: Callable[[MicroBatch, torch.Tensor], torch.Tensor] = lambda _, values_P: values_P,
    ) -> Iterator[torch.Tensor]:
        """Yield the first output for each micro-batch, [P] on every stage, without gradient.

        Args:
            of: makes something else of it, of the same shape.
        """

        return self._forward(batches, lambda batch, values_KP: of(batch, values_KP[0]), lambda _: ())

    def second_output(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        """Yield the second output for each micro-batch, [P] on every stage, without gradient."""
        return self._forward(batches, lambda _, values_KP: values_KP[1], lambda _: ())

    def both_outputs(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        """Yield the first two outputs for each micro-batch, [2, P] on every stage, without gradient."""
        return self._forward(batches, lambda _, values_KP: values_KP[:2], lambda _: (2,))

    def top_outputs(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        """Yield all outputs for each micro-batch that asks for `top_k`, [1 + 2 top_k, P] on every stage, without gradient; see `top_columns`."""
        return self._forward(batches, lambda _, values_KP: values_KP, lambda batch: (1 + 2 * batch.top_k,))

    def _forward(
        self,
        batches: MicroBatches,
        of: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
        shape: Callable[[MicroBatch], tuple[int, ...]],
    ) -> Iterator[torch.Tensor]:
        """Yield what `of` makes of each micro-batch's outputs, [*shape, P] on every stage."""

        def result(batch: MicroBatch, values_KP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return values_KP.new_zeros(1), of(batch, values_KP).contiguous()

        if self._stages == 1:
            for batch in batches:
                yield from self._run([batch], result, backward=False)
            return
        waiting = list(batches)
        found = self._run(waiting, result, backward=False)
        for number, batch in enumerate(waiting):
            tokens, device = len(batch.token_ids), self._data.device
            values_P = found[number] if self._last else torch.empty(*shape(batch), tokens, device=device)
            dist.broadcast(values_P, self._last_stage_rank, pipeline_group())
            yield values_P

    def _run(self, batches: MicroBatches, result: Result, *, backward: bool) -> list[Any]:
        """Return what is kept of each micro-batch; on a stage that is not the last, nothing."""
        items: Any = batches if self._stages == 1 else self._padded(list(batches))
        count, longest = len(items), 0
        if self._stages > 1 and not self._dynamic:
            longest = self._least(max(padded_total(batch.lengths) for batch in items))
        for chunk in self._chunks:
            chunk.train(backward)

        def step(taken: Iterator[MicroBatch], chunk: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch, device = next(taken), self._data.device
            packing = Packing.of(batch, device, longest or self._least(padded_total(batch.lengths)))
            batch = batch.to(device)
            if self._routing is not None:
                packing.routed = self._routing.tokens(batch, packing, trained=backward)
            ids = packing.share(batch.token_ids)[None]
            output = chunk(ids, None, None, labels=batch.labels, packed_seq_params=packing)
            return output, lambda values_KP: result(batch, values_KP)

        with nullcontext() if backward else torch.no_grad():
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(items) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=count,
                seq_length=longest,
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _least(self, tokens: int) -> int:
        return int(self._data.max([tokens])[0]) if self._even else tokens

    def _count(self, batches: int) -> int:
        # an interleaved schedule wants as many as it has stages, or a multiple of it
        return batches if len(self._chunks) == 1 else -(-batches // self._stages) * self._stages

    def _padded(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        return batches + [idle_micro_batch() for _ in range(self._count(len(batches)) - len(batches))]

    @property
    def _last_stage_rank(self) -> int:
        return parallel_state.get_pipeline_model_parallel_last_rank()

    def _from_last_stage(self, totals: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = broadcast_json(
            {name: value.item() for name, value in totals.items()}, self._last_stage_rank, pipeline_group()
        )
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


def top_columns(values_KP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities of the labels [P], and ids [P, K] int64 and log-probabilities [P, K] of the most probable tokens, from `top_outputs`."""
    ids_KP, top_KP = values_KP[1:].chunk(2)
    return values_KP[0], ids_KP.T.long(), top_KP.T
