"""LoRA (arXiv:2106.09685): a frozen model with trained adapters of low rank, W x + s B A x, by PEFT.

PEFT puts a layer of its own in the place of each linear layer that gets an adapter: what was `q_proj.weight` is `q_proj.base_layer.weight` then,
and the adapter is `q_proj.lora_A.default.weight` [r, in] and `q_proj.lora_B.default.weight` [out, r].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.sections.model import LoraConfig
from hpcrl.errors import DataError, did_you_mean

_ADAPTER = "default"
_BASE, _LORA = ".base_layer.", ".lora_"
_ALL = "all-linear"

_Draw = Callable[[torch.Tensor, torch.Generator], object]
# Of A, [r, in]; B begins at 0, so that training begins with the model as it is. xavier and normal as in Megatron-Bridge, the others as in PEFT.
_DRAWN: dict[str, _Draw] = {
    "kaiming": lambda A, generator: nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator),
    "xavier": lambda A, generator: nn.init.xavier_normal_(A, generator=generator),
    "normal": lambda A, generator: nn.init.normal_(A, std=0.2, generator=generator),
    "gaussian": lambda A, generator: nn.init.normal_(A, std=1 / len(A), generator=generator),
}


@dataclass(frozen=True)
class Adapted:
    """A linear layer with an adapter.

    Attributes:
        name: that the layer has in the model without adapters.
        A, B: parameters, [r, in] and [out, r].
        scaling: s.
    """

    name: str
    A: torch.Tensor
    B: torch.Tensor
    scaling: float


def add_adapters(model: PreTrainedModel, lora: LoraConfig, role: str, dtype: torch.dtype, seed: int) -> None:
    """Freeze a model and give it adapters; where it is on the meta device, they have no values either.

    Args:
        role: section of the model, for errors: trainer.policy or trainer.critic.
        dtype: of the adapters.
        seed: of their first values.

    Raises:
        DataError: names of modules find nothing.
    """
    import peft

    model.requires_grad_(False)
    targets = _targets(model, lora, f"{role}.model.lora")
    # their values come below
    peft.inject_adapter_in_model(_peft_config(lora, targets), model, _ADAPTER, low_cpu_mem_usage=True)
    for name in targets:
        layer = model.get_submodule(name)
        device = next(layer.base_layer.parameters()).device  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        for matrix in _matrices(layer):
            matrix.to_empty(device=device).to(dtype)
    if model.device.type != "meta":
        for adapted, first_A in zip(adapted_layers(model), first_values(model, lora, seed), strict=True):
            adapted.A.data.copy_(first_A)
            nn.init.zeros_(adapted.B)


def adapted_layers(model: nn.Module) -> Iterator[Adapted]:
    """Yield the layers that have adapters."""
    for name, layer in model.named_modules():
        if hasattr(layer, "base_layer"):
            adapter: Any = layer
            a, b = _matrices(adapter)
            yield Adapted(name, a.weight, b.weight, adapter.scaling[_ADAPTER])


def first_values(model: nn.Module, lora: LoraConfig, seed: int) -> Iterator[torch.Tensor]:
    """Yield A of each adapted layer, [r, in] float32 on the CPU, as training begins with it; B begins at 0."""
    generator = torch.Generator().manual_seed(seed)
    for adapted in adapted_layers(model):
        A = torch.empty(adapted.A.shape, device="cpu")
        _DRAWN[lora.init_method](A, generator)
        yield A


def _peft_config(lora: LoraConfig, targets: list[str], base: str | None = None) -> Any:
    import peft  # takes half a second, and most runs have no adapters

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        alpha_pattern=lora.alpha_pattern,
        rank_pattern=lora.rank_pattern,
    )


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
    parts = [parts] if isinstance(parts, str) else parts
    for part in parts:
        if not any(part in name for name in linear):
            leaves = sorted({name.rpartition(".")[2] for name in linear})
            hint = did_you_mean(part, leaves, 3, 0.3) or f"; it has {', '.join(leaves)}"
            raise DataError(f'{setting} "{part}": the model has no linear layer with that in its name{hint}')
    return [name for name in linear if any(part in name for part in parts)]


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
        elif _LORA not in name:
            yield name, parameter, None


def merging(layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes W + s B A, float32, of W, [out, in]. All ranks call it, whoever merges.

    Args:
        layer: that adapts W.
        whole: gathers a parameter that may be sharded.
    """
    A, B = (whole(matrix.weight.detach()).float() for matrix in _matrices(layer))
    return lambda W: W.float() + layer.scaling[_ADAPTER] * (B @ A)


def adapter_writer(
    model: nn.Module, lora: LoraConfig, base: str, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Path], None]:
    """Return what writes a model's adapters into a new directory, as PEFT reads them.

    Args:
        base: path or hub id of the model that they adapt.
        whole: gathers a parameter that may be sharded.
    """
    found = {
        adapted.name: (whole(adapted.A.detach()).cpu(), whole(adapted.B.detach()).cpu())
        for adapted in adapted_layers(model)
    }
    return peft_writer(found, lora, base)


def peft_writer(
    adapters: Mapping[str, tuple[torch.Tensor, torch.Tensor]], lora: LoraConfig, base: str
) -> Callable[[Path], None]:
    """Return what writes adapters into a new directory, as PEFT reads them.

    Args:
        adapters: by the name of the layer that they adapt: A and B, whole.
        base: path or hub id of the model that they adapt.
    """
    config = _peft_config(lora, sorted(adapters), base)
    tensors = {
        f"base_model.model.{name}{_LORA}{letter}.weight": matrix
        for name, matrices in adapters.items()
        for letter, matrix in zip("AB", matrices, strict=True)
    }

    def write(directory: Path) -> None:
        config.save_pretrained(str(directory))
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})

    return write


@contextmanager
def without_dropout(model: nn.Module, dropout: float) -> Iterator[None]:
    """Let a model compute as it does when it is not trained; `dropout` is the probability that its adapters have, and all that it has."""
    layers = [module for module in model.modules() if isinstance(module, nn.Dropout)] if dropout else []
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute as if it had no adapters."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "base_layer")]
    for layer in layers:  # PEFT's enable_adapters would also freeze them
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
