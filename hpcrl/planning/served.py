"""Estimates the memory of models without training, on devices of their own: served reward models, and models of scorers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.rules.megatron_groups import ParallelLayout, layers_of_stages, padded
from hpcrl.config.scorers import REWARD, TEACHER, ScorerSet, scorer_sets, scorers_per_node
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.token_limits import largest_micro_batch, longest_sample
from hpcrl.errors import DataError
from hpcrl.planning.memory import (
    BYTES,
    Need,
    Shapes,
    fsdp_gathered,
    fsdp_state,
    layer_activations,
    logprob_buffer,
)
from hpcrl.planning.partition import stage_parameters

_BYTES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Served:
    """A model that only computes.

    Attributes:
        what: it is, in words.
        processes: that hold it, `ranks` for each copy.
        together: of those, how many share what a node without GPUs has.
        tokens: of a forward pass, as far as one process computes them.
        scorers: whose it is; None: of reward services.
    """

    what: str
    model: Pretrained
    processes: int
    ranks: int
    together: int
    tokens: int
    scorers: ScorerSet | None = None


def served(config: Config) -> Iterator[Served]:
    """Yield the models of a run's reward services and scorers."""
    if count := config.reward_services:
        service = config.environment.remote_reward.service
        assert service.model is not None
        tokens = max(service.max_batch_tokens, longest_sample(config))
        yield Served("reward model", Pretrained(service.model), count, 1, max(1, config.slurm.gpus), tokens)
    own, longest = config.trainer.distillation, longest_sample(config)
    for each in scorer_sets(config):
        tokens = largest_micro_batch(config)
        if each.engine:
            tokens = own.engine.max_num_batched_tokens
        elif each.role == TEACHER:
            tokens = max(own.max_tokens_per_micro_batch or own.micro_batch_size_per_gpu * longest, longest)
        elif each.role == REWARD:
            tokens = max(config.environment.reward_model.max_tokens_per_micro_batch, longest)
        together = each.ranks_per_node * max(1, min(each.replicas, scorers_per_node(config, each)))
        of_rank = -(-tokens // each.sharing)
        yield Served(each.title, each.model, each.copies * each.ranks, each.ranks, together, of_rank, each)


def served_shapes(config: Config, model: Served, folder_of: Callable[[Pretrained], Path | None]) -> Shapes:
    """Return the parameters and sizes of a model.

    Args:
        folder_of: a model -> the directory that has its config.json; None: it is on a hub, and is asked for there.
    """
    from hpcrl.planning.shapes import classifier_shapes, shapes
    from hpcrl.trainer.models.build import scorer_source

    path = str(folder_of(model.model) or model.model.path)
    if model.scorers is None:
        return classifier_shapes(replace(model.model, path=path))
    return shapes(replace(scorer_source(config.trainer, model.scorers), path=path), model.scorers.fsdp, None)


def forward_need(config: Config, model: Served, shapes: Shapes, memory: float | None) -> Need:
    """Return the memory of a process that computes without gradients.

    Args:
        memory: bytes of a GPU; None: not known, or there is none.
    """
    trainer = config.trainer
    if model.scorers is None:
        dtype = _BYTES[config.environment.remote_reward.service.model_dtype]
        return replace(fsdp_state(shapes.weights, 1, dtype), activations=_activations(shapes, model.tokens, dtype))
    if model.scorers.engine:  # which computes the logits of all tokens of a pass together
        dtype = _BYTES[trainer.distillation.engine.model_dtype]
        logits = logprob_buffer(model.tokens, shapes.width.vocabulary, BYTES["fp32"])
        need = fsdp_state(shapes.weights, model.ranks, dtype)
        return replace(need, activations=_activations(shapes, model.tokens, dtype), logprobs=logits)
    if model.scorers.role == TEACHER and trainer.distillation.backend == "megatron":
        return _megatron_need(config, model, shapes)
    fsdp, on_gpu = model.scorers.fsdp, config.slurm.gpus > 0
    dtype = fsdp.mixed_precision.param_dtype
    whole = fsdp_state(shapes.weights, 1, dtype).weights
    on_node = model.scorers.ranks_per_node
    copy = fsdp.copy_ranks(model.ranks, on_node, whole, memory if on_gpu else None)
    need = fsdp_state(shapes.weights, copy, dtype)
    if fsdp.cpu_offload and on_gpu:
        need = replace(need, weights=0)
    if fsdp.is_needed(model.ranks, dtype, on_gpu=on_gpu):
        reduce_dtype = fsdp.mixed_precision.reduce_dtype
        gathered = fsdp_gathered(shapes.weights, copy, dtype, reduce_dtype, fsdp.reshard_after_forward)
        need = replace(need, gathered=gathered)
    if model.scorers.role == REWARD:  # one number for a conversation
        return replace(need, activations=_activations(shapes, model.tokens, dtype))
    rows = min(trainer.logprobs_chunk_size, model.tokens)
    logits = logprob_buffer(rows, shapes.width.vocabulary, BYTES[trainer.algorithm.logprob_dtype])
    return replace(need, activations=_activations(shapes, model.tokens, dtype), logprobs=logits)


def _megatron_need(config: Config, model: Served, shapes: Shapes) -> Need:
    sizes = config.trainer.distillation.megatron_layout
    layout, layers = ParallelLayout.of(sizes, model.ranks), layers_of_stages(shapes.width.layers, sizes)
    if layers is None:
        raise DataError(
            f"trainer.distillation.placement.pipeline_parallel_size: {layout.pipeline} stages cannot have equally many of the teacher's "
            f"{shapes.width.layers} layers"
        )
    most = max(stage.count for stage in stage_parameters(shapes.weights, layout, layers))
    tokens = -(-model.tokens // (layout.tensor * layout.context))
    vocabulary = padded(shapes.width.vocabulary, layout.tensor) // layout.tensor
    rows, dtype = min(config.trainer.logprobs_chunk_size, -(-model.tokens // layout.context)), sizes.dtype
    logits = logprob_buffer(rows, vocabulary, BYTES[config.trainer.algorithm.logprob_dtype])
    return Need(
        weights=BYTES[dtype] * most,
        gradients=0,
        optimizer=0,
        activations=_activations(shapes, tokens, dtype),
        logprobs=logits,
    )


def _activations(shapes: Shapes, tokens: int, dtype: str) -> int:
    """Return the bytes of one layer at a time: nothing is kept for backward."""
    return tokens * layer_activations(shapes.width, BYTES[dtype], fused=False)
