"""Activation recomputation of a transformers model, with offloading to host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hpcrl.config.sections.trainer import Recomputation

# what scaled_dot_product_attention and varlen_attn become, but for the kernel that has all scores
_ATTENTION = [
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def recompute(model: PreTrainedModel, settings: Recomputation, *, offload: bool) -> None:
    """Recompute the layers of a model in backward: they keep their inputs, and activations by the settings.

    Args:
        offload: the inputs are kept in host memory, pinned where there is a GPU, so that the host does not wait for copies.
    """
    options: dict[str, Any] = {"use_reentrant": settings.reentrant}
    if settings.keep == "attention":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _ATTENTION)
    model.gradient_checkpointing_enable(options, settings.every)
    if offload:  # not transformers' own, which wants pinned memory where there is no GPU either
        layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for layer in layers:
            layer._gradient_checkpointing_func = partial(_offloaded, partial(checkpoint, **options))


def _offloaded(checkpointed: Callable[..., Any], layer: Callable[..., Any], *inputs: Any) -> Any:
    with save_on_cpu(pin_memory=True):
        return checkpointed(layer, *inputs)
