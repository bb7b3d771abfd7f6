"""Estimates the memory of each trainer rank; pure arithmetic on the models' shapes, for both engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpcrl.config import Config
from hpcrl.config.rules.megatron_groups import ParallelLayout, layers_of_stages, padded
from hpcrl.config.sections.reward_model import HEAD
from hpcrl.config.sections.trainer import Recomputation
from hpcrl.config.token_limits import largest_micro_batch
from hpcrl.errors import DataError
from hpcrl.planning.devices import memory_of_rank
from hpcrl.planning.memory import (
    BYTES,
    Need,
    Shapes,
    Width,
    activations,
    copied_keys,
    exchanged_heads,
    fsdp_gathered,
    fsdp_state,
    layer_activations,
    logprob_buffer,
    megatron_state,
    merged_experts,
    peak,
    recomputed_activations,
)
from hpcrl.planning.partition import StageParameters, stage_parameters
from hpcrl.planning.prefixes import shared_prompt


@dataclass(frozen=True)
class Estimate:
    """Memory of the ranks that need most.

    Attributes:
        ranks: those ranks.
        needs: by role: policy, ref and critic, as far as these ranks have them.
        counts: parameters of a rank of each pipeline stage, by role; with FSDP2 one stage.
    """

    ranks: range
    needs: dict[str, Need]
    counts: dict[str, list[int]]

    @property
    def total(self) -> int:
        return peak(list(self.needs.values()))


def estimate(config: Config, models: Mapping[str, Shapes]) -> Estimate:
    """Estimate the memory of the policy and of the models on its ranks.

    Args:
        models: by role, as hpcrl.planning.shapes finds them.

    Raises:
        DataError: how Megatron's ranks share a model is not known.
    """
    trainer = config.trainer
    if trainer.strategy == "megatron":
        return _megatron(config, models)
    beside = {role: shapes for role, shapes in models.items() if role != "critic" or not trainer.has_own_critic}
    return _fsdp(config, beside, range(trainer.placement.policy_ranks), trainer.placement.policy_num_gpus_per_node)


def estimate_critic(config: Config, models: Mapping[str, Shapes]) -> Estimate | None:
    """Estimate the memory of a critic on ranks of its own; None: it is beside the policy, or there is none. Arguments as of `estimate`."""
    if not config.trainer.has_own_critic:
        return None
    first = config.trainer.placement.policy_ranks
    ranks, on_node = (
        range(first, first + config.trainer.placement.critic_ranks),
        config.trainer.placement.critic_nodes[1],
    )
    return _fsdp(config, {"critic": models["critic"]}, ranks, on_node)


def _fsdp(config: Config, models: Mapping[str, Shapes], which: range, on_node: int) -> Estimate:
    trainer, ranks, device = config.trainer, len(which), memory_of_rank(config, on_node)[0]
    on_gpu = config.slurm.gpus > 0
    needs, counts = dict[str, Need](), dict[str, list[int]]()
    for role, shapes in models.items():
        together = trainer.critic_model_parallel_size if role == "critic" else trainer.model_parallel_size
        tokens = -(-largest_micro_batch(config) // together)
        section = trainer.critic if role == "critic" else trainer.policy
        fsdp = trainer.ref_sharding if role == "ref" else section.fsdp_config
        precision = fsdp.mixed_precision
        averaged = trainer.distillation.self_teacher_model == "ema"
        dtype = precision.param_dtype if role == "ref" and not averaged else precision.master_dtype
        frozen = precision.param_dtype if role in trainer.adapters else dtype
        whole = fsdp_state(shapes.weights, 1, dtype, frozen_dtype=frozen)
        state = whole.weights + whole.gradients + whole.optimizer
        copy = fsdp.copy_ranks(ranks, on_node, state, device if on_gpu else None)
        twice = role == "policy" and trainer.reference_has_values
        need = fsdp_state(
            shapes.weights,
            copy,
            dtype,
            frozen_dtype=frozen,
            twice=twice,
            moments=section.optimizer_config.moments,
            muon=section.optimizer_config.name == "Muon",
            schedule_free=section.optimizer_config.name == "ScheduleFreeAdamW",
        )
        if copy < ranks:  # each copy adds its gradients up in the type of the reduction
            wider = max(1, BYTES[precision.reduce_dtype] // BYTES[dtype])
            need = replace(need, gradients=need.gradients * wider)
        if fsdp.cpu_offload and on_gpu:
            need = Need(weights=0, gradients=0, optimizer=0)
        if fsdp.is_needed(ranks, dtype, on_gpu=on_gpu):
            gathered = fsdp_gathered(
                shapes.weights, copy, precision.param_dtype, precision.reduce_dtype, fsdp.reshard_after_forward
            )
            need = replace(need, gathered=gathered)
        if role != "ref":
            size, recompute = BYTES[precision.param_dtype], trainer.gradient_checkpointing
            offloaded = role == "policy" and trainer.policy.activation_offload
            kept = _activations(trainer.recomputation, shapes.width, tokens, size, offloaded=offloaded)
            kept += merged_experts(shapes.weights, precision.param_dtype, recompute=recompute)
            kept += exchanged_heads(shapes.width, tokens, together, size, recompute=recompute)
            if group := shared_prompt(config):
                copied = tokens * (group.whole - group.computed) // group.computed
                kept += copied_keys(shapes.width, copied, size, recompute=recompute)
            again = tokens * layer_activations(shapes.width, size, fused=False) if recompute else 0
            need = replace(need, activations=kept, recomputed=again)
        if role != "critic" and not trainer.trains_reward_model:
            need = replace(
                need,
                logprobs=_logprobs(
                    trainer.logprobs_chunk_size, trainer.algorithm.logprob_dtype, tokens, shapes.width.vocabulary
                ),
            )
        needs[role] = need
        counts[role] = [sum(weight.on(copy) for weight in shapes.weights)]
    return Estimate(which, needs, counts)


def _activations(recomputed: Recomputation | None, width: Width, tokens: int, size: int, *, offloaded: bool) -> int:
    if recomputed is None:
        return activations(width, tokens, size, fused=False, recompute=False, layers=width.layers)
    return recomputed_activations(
        width,
        tokens,
        size,
        every=recomputed.every,
        attention=recomputed.keep == "attention",
        offloaded=offloaded,
    )


def _logprobs(chunk: int, dtype: str, tokens: int, vocabulary: int) -> int:
    return logprob_buffer(min(chunk, tokens), vocabulary, BYTES[dtype])


def _megatron(config: Config, models: Mapping[str, Shapes]) -> Estimate:
    trainer, sizes = config.trainer, config.trainer.policy.megatron_config
    layout = ParallelLayout.of(sizes, trainer.placement.policy_ranks)
    shared: dict[str, list[StageParameters]] = {}
    for role, shapes in models.items():
        layers = layers_of_stages(shapes.width.layers, sizes)
        if layers is None:
            raise DataError(
                "trainer.policy.megatron_config.transformer_config_kwargs splits the layers in a way that hpcrl does not know, so memory "
                "cannot be estimated"
            )
        head = trainer.algorithm.value_head_prefix if role == "critic" else None
        if trainer.trains_reward_model:
            head = HEAD
        one_A = sizes.lora_type == "lora"
        shared[role] = stage_parameters(
            shapes.weights, layout, layers, sizes.pipeline_layers_per_stage, head, one_A=one_A
        )
    stages = [
        {role: _of_stage(config, layout, role, shapes, shared[role][stage], stage) for role, shapes in models.items()}
        for stage in range(layout.pipeline)
    ]
    most = max(range(layout.pipeline), key=lambda stage: peak(list(stages[stage].values())))
    counts = {role: [part.count for part in found] for role, found in shared.items()}
    return Estimate(layout.ranks_of_stage(most), stages[most], counts)


def _of_stage(
    config: Config, layout: ParallelLayout, role: str, shapes: Shapes, part: StageParameters, stage: int
) -> Need:
    trainer, sizes = config.trainer, config.trainer.policy.megatron_config
    bf16, options = sizes.dtype != "fp32", sizes.optimizer_config_kwargs
    section = trainer.critic if role == "critic" else trainer.policy
    by_muon = part.dense_matrices, part.expert_matrices
    need = megatron_state(
        part.dense,
        part.experts,
        layout.data * layout.context,
        layout.expert_data,
        bf16=bf16,
        fp32_gradients=sizes.ddp_config.grad_reduce_in_fp32,
        distributed=options.get("use_distributed_optimizer", True),
        offloaded=options.get("optimizer_offload_fraction", 0.0) if options.get("optimizer_cpu_offload") else 0.0,
        frozen=part.frozen,
        twice=role == "policy" and trainer.reference_has_values,
        by_muon=by_muon if section.optimizer_config.name == "Muon" else (0, 0),
    )
    tokens, layers = largest_micro_batch(config), layers_of_stages(shapes.width.layers, sizes)
    assert layers is not None
    kwargs = sizes.transformer_config_kwargs
    full = kwargs.get("recompute_granularity") == "full" and kwargs.get("recompute_method") == "uniform"
    if role != "ref":
        kept = activations(
            shapes.width,
            padded(tokens, layout.sample_multiple()) // (layout.tensor * layout.context),
            2 if bf16 else 4,
            fused=True,
            recompute=trainer.gradient_checkpointing and full,
            layers=layers[stage],
            passes=_passes(layout.pipeline, stage, layers[stage], sizes.pipeline_layers_per_stage),
            every=kwargs.get("recompute_num_layers") or 1,
        )
        need = replace(need, activations=kept)
    if role != "critic" and not trainer.trains_reward_model and stage == layout.pipeline - 1:
        vocabulary = padded(shapes.width.vocabulary, layout.tensor) // layout.tensor
        need = replace(
            need,
            logprobs=_logprobs(
                trainer.logprobs_chunk_size, trainer.algorithm.logprob_dtype, -(-tokens // layout.context), vocabulary
            ),
        )
    return need


def _passes(stages: int, stage: int, layers: int, per_stage: int | None) -> int:
    """Return how many micro-batches of all its layers a stage keeps at most (arXiv:2205.05198, section 4.2.3)."""
    if per_stage is None:
        return stages - stage
    return stages + -(-(stages - 1) * per_stage // layers)  # p + (p - 1) / m, with m virtual stages per rank
