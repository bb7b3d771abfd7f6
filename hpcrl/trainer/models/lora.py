"""LoRA (arXiv:2106.09685): a frozen model with trained adapters of low rank, W x + s B A x, by PEFT.

PEFT puts a layer of its own in the place of each linear layer that gets an adapter: what was `q_proj.weight` is `q_proj.base_layer.weight` then,
and the adapter is `q_proj.lora_A.default.weight` [r, in] and `q_proj.lora_B.default.weight` [out, r].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.sections.model import LoraConfig
from hpcrl.errors import DataError, did_you_mean

_ADAPTER = "default"
_BASE = ".base_layer."
_ALL = "all-linear"

_Draw = Callable[[torch.Tensor, torch.Generator], object]
# Of A, [r, in]; B begins at 0, so that training begins with the model as it is. xavier and normal as in Megatron-Bridge, the others as in PEFT.
_DRAWN: dict[str, _Draw] = {
    "kaiming": lambda A, generator: nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator),
    "xavier": lambda A, generator: nn.init.xavier_normal_(A, generator=generator),
    "normal": lambda A, generator: nn.init.normal_(A, std=0.2, generator=generator),
    "gaussian": lambda A, generator: nn.init.normal_(A, std=1 / len(A), generator=generator),
}


def add_adapters(model: PreTrainedModel, lora: LoraConfig, role: str, dtype: torch.dtype, seed: int) -> None:
    """Freeze a model and give it adapters; where it is on the meta device, they have no values either.

    Args:
        role: section of the model, for errors: trainer.policy or trainer.critic.
        dtype: of the adapters.
        seed: of their first values.

    Raises:
        DataError: names of modules find nothing.
    """
    import peft  # takes half a second, and most runs have no adapters

    model.requires_grad_(False)
    targets = _targets(model, lora, f"{role}.model.lora")
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets,
        use_rslora=lora.use_rslora,
        alpha_pattern=lora.alpha_pattern,
        rank_pattern=lora.rank_pattern,
    )
    peft.inject_adapter_in_model(config, model, _ADAPTER, low_cpu_mem_usage=True)  # their values come below
    generator = torch.Generator().manual_seed(seed)
    for name in targets:
        layer = model.get_submodule(name)
        device = next(layer.base_layer.parameters()).device  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        a, b = _matrices(layer)
        a.to_empty(device=device).to(dtype)
        b.to_empty(device=device).to(dtype)
        if device.type != "meta":
            _DRAWN[lora.init_method](a.weight, generator)
            nn.init.zeros_(b.weight)


def _targets(model: PreTrainedModel, lora: LoraConfig, section: str) -> list[str]:
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    wanted, left_out = lora.target_modules, lora.exclude_modules
    chosen = linear if wanted == _ALL else _named(linear, wanted, f"{section}.target_modules")
    excluded = [] if left_out is None else _named(linear, left_out, f"{section}.exclude_modules")
    if not (targets := [name for name in chosen if name not in excluded]):
        raise DataError(f"{section}.exclude_modules leaves no module to adapt; leave one")
    return targets


def _named(linear: list[str], parts: str | list[str], setting: str) -> list[str]:
    for part in [parts] if isinstance(parts, str) else parts:
        if not any(part in name for name in linear):
            leaves = sorted({name.rpartition(".")[2] for name in linear})
            hint = did_you_mean(part, leaves, 3, 0.3) or f"; it has {', '.join(leaves)}"
            raise DataError(f'{setting} "{part}": the model has no linear layer with that in its name{hint}')
    return [name for name in linear if any(part in name for part in ([parts] if isinstance(parts, str) else parts))]


def _matrices(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    return layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]


def own_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield the parameters of a model without those of its adapters: name in the model without adapters, parameter, and the layer that adapts it or None."""
    for name, parameter in model.named_parameters():
        owner, is_base, leaf = name.rpartition(_BASE)
        if is_base:
            yield own_name(name), parameter, model.get_submodule(owner) if leaf == "weight" else None
        elif f".{_ADAPTER}." not in name:
            yield name, parameter, None


def merged(base: torch.Tensor, layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return W + s B A, float32.

    Args:
        base: W, [out, in].
        layer: that adapts it.
        whole: gathers a parameter that may be sharded.
    """
    A, B = (whole(matrix.weight.detach()).float() for matrix in _matrices(layer))
    return base.float() + layer.scaling[_ADAPTER] * (B @ A)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute as if it had no adapters."""
    layers = [model.get_submodule(name.rpartition(_BASE)[0]) for name, _ in model.named_parameters() if _BASE in name]
    for layer in layers:  # PEFT's enable_adapters would also freeze them
        layer._disable_adapters = True  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # pyright: ignore[reportArgumentType]
