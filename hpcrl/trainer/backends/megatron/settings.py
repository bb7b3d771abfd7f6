"""Megatron-core's configurations from ours; a *_kwargs field overrides derived values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from hpcrl.config.sections import model as own
from hpcrl.config.sections.megatron import MegatronConfig, MegatronModelConfig
from hpcrl.errors import DataError, did_you_mean
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.layers import uses_transformer_engine
from hpcrl.trainer.models.forward import DTYPES

Settings = TypeVar("Settings")


def transformer_config(
    architecture: Architecture,
    megatron: MegatronModelConfig,
    role: str,
    *,
    recompute: bool,
    deterministic: bool,
) -> TransformerConfig:
    """Return the TransformerConfig of a model.

    Args:
        role: section of the configuration, such as "trainer.policy"; for errors.
        recompute: activations are computed again in backward.

    Raises:
        DataError: megatron_config.transformer_config_kwargs has what Megatron-core does not know or refuses.
    """
    dtype, moe = DTYPES[megatron.dtype], "num_moe_experts" in architecture.transformer
    virtual = virtual_stages(architecture, megatron)
    derived: dict[str, Any] = architecture.transformer | {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        # of two ranks, each is before the other and behind it: in one batch, activations and gradients are taken for each other
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "sequence_parallel": megatron.tensor_model_parallel_size > 1,
        "variable_seq_lengths": megatron.pipeline_dynamic_shape,
        "moe_token_dispatcher_type": megatron.moe_token_dispatcher_type,
        "deterministic_mode": deterministic,
    }
    if moe:
        derived |= {
            "moe_router_load_balancing_type": megatron.moe_router_load_balancing_type,
            # one kernel for all experts is TransformerEngine's; without it they are multiplied one after the other
            "moe_grouped_gemm": megatron.moe_grouped_gemm and uses_transformer_engine(),
        }
        optional = {
            "moe_router_score_function": megatron.moe_router_score_function,
            "moe_router_enable_expert_bias": megatron.moe_router_enable_expert_bias,
        }
        derived |= {name: value for name, value in optional.items() if value is not None}
    given = megatron.transformer_config_kwargs
    unused = [name for name in given if not recompute and name.startswith("recompute_")]
    if given.get("recompute_granularity") == "selective":  # and how whole layers are computed again is refused
        unused += ["recompute_method", "recompute_num_layers"]
    given = {name: value for name, value in given.items() if name not in unused}
    return _made(TransformerConfig, derived, given, f"{role}.megatron_config.transformer_config_kwargs")


def virtual_stages(architecture: Architecture, megatron: MegatronModelConfig) -> int | None:
    """Return the parts of each pipeline stage; None: it has one."""
    each = megatron.pipeline_layers_per_stage
    if megatron.pipeline_schedule != "Interleaved1F1B" or each is None:
        return None
    return architecture.transformer["num_layers"] // (megatron.pipeline_model_parallel_size * each)


def optimizer_config(optimizer: own.OptimizerConfig, megatron: MegatronConfig, role: str) -> OptimizerConfig:
    """Return the optimizer's configuration.

    Raises:
        DataError: megatron_config.optimizer_config_kwargs has what Megatron-core does not know or refuses.
    """
    dtype = DTYPES[megatron.dtype]
    derived: dict[str, Any] = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_betas[0],
        "adam_beta2": optimizer.adam_betas[1],
        "adam_eps": optimizer.eps,
        "decoupled_weight_decay": optimizer.name != "Adam",
        "clip_grad": max(0.0, optimizer.max_grad_norm),
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_distributed_optimizer": True,
        "overlap_param_gather": megatron.ddp_config.overlap_param_gather,
    }
    where, given = f"{role}.megatron_config.optimizer_config_kwargs", megatron.optimizer_config_kwargs
    if given.get("use_precision_aware_optimizer") and not uses_transformer_engine():
        # Megatron-core fails at the comparison of versions of what is not there
        raise DataError(
            f"{where}.use_precision_aware_optimizer: needs the optimizer of TransformerEngine, which is not used here (it needs a GPU, and "
            "transformer_engine installed); leave it out"
        )
    return _made(OptimizerConfig, derived, given, where)


def ddp_config(
    megatron: MegatronConfig, optimizer: OptimizerConfig, device: torch.device
) -> DistributedDataParallelConfig:
    """Return the options of gradient reduction."""
    ddp = megatron.ddp_config
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        average_in_collective=ddp.average_in_collective and device.type == "cuda",  # gloo only sums
    )


def _made(kind: type[Settings], derived: dict[str, Any], given: dict[str, Any], where: str) -> Settings:
    known = {each.name for each in fields(kind)}  # pyright: ignore[reportArgumentType]
    for name in given:
        if name not in known:
            raise DataError(
                f"{where}.{name}: Megatron-core's {kind.__name__} has no such field" + did_you_mean(name, known)
            )
    try:
        return kind(**(derived | given))
    except (ValueError, AssertionError, TypeError) as error:
        raise DataError(f"{where}: Megatron-core refuses these settings: {error}") from error
