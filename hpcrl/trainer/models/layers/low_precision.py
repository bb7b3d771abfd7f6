"""Linear layers that multiply in FP8, by torchao."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.sections.model import LowPrecisionConfig
from hpcrl.errors import RunError

_MULTIPLE = 16  # of rows and columns, which the kernels want
_OF_FLOAT8 = "linear_mm_config"  # by which torchao's layers are known where torchao need not be
_CAPABILITY = (8, 9)
_ROUTERS = ("gate", "router")  # what an expert is chosen by is rounded no further
_OTHER_PARTS = {"visual", "vision_tower", "vision_model"}


def compute_in_fp8(model: PreTrainedModel, settings: LowPrecisionConfig, device: torch.device) -> None:
    """Convert linear layers of a model to FP8 products in forward and backward, if configured. Raises RunError where the GPU has none.

    Weights, activations and gradients stay what they are, and are scaled and rounded for each product. Which layers: `in_fp8`. On a CPU
    the products are computed from the rounded numbers in their own type: results are those of a GPU but for the order of sums.

    Args:
        model: may be on the meta device; its parameters keep their names.
        device: that it is going to be on.
    """
    if not settings.fp8:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise RunError(
            f"trainer.policy.low_precision.fp8: {torch.cuda.get_device_name(device)} has no products in FP8, which need a compute capability "
            "of 8.9 (Ada, Hopper or newer); set it to false"
        )
    layers = set(in_fp8(model))
    config = replace(
        Float8LinearConfig.from_recipe_name(settings.fp8_granularity),
        pad_inner_dim=True,  # the gradient of a weight sums over tokens, of which there may be any number
        emulate=device.type != "cuda",
    )
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in layers, config=config)


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """Compute the products of a model in the type of its parameters for a while, without compiled code: as an engine that has the same weights."""
    rounding = [module for module in model.modules() if isinstance(module, nn.Linear) and hasattr(module, _OF_FLOAT8)]
    if not rounding:
        yield
        return
    for module in rounding:
        module.forward = partial(nn.Linear.forward, module)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in rounding:
            del module.forward


def in_fp8(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers whose products can be in FP8: those with inputs and outputs in multiples of 16.

    Left out are the head, routers of experts and the parts that see pictures. Experts that are one parameter for a layer are no linear layers.
    """
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and module.in_features % _MULTIPLE == 0 == module.out_features % _MULTIPLE
        and name.rpartition(".")[2] not in _ROUTERS
        and not _OTHER_PARTS.intersection(name.split("."))
    ]
