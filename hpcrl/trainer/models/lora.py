"""LoRA (arXiv:2106.09685): a frozen model with trained adapters of low rank, W x + s B A x, by PEFT.

PEFT wraps each adapted linear layer: `q_proj.weight` becomes `q_proj.base_layer.weight`. The adapter is `q_proj.lora_A.default.weight` [r,
in] and `q_proj.lora_B.default.weight` [out, r]. The experts of a layer are one module with a parameter for each matrix, [experts, out,
in]. The adapter of a parameter wraps that module, and the adapters of two wrap it one around the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.sections.model import LoraConfig, Pretrained
from hpcrl.data.entries import read_entries
from hpcrl.data.weight_files import ADAPTER_FILE, ADAPTER_PREFIX
from hpcrl.errors import DataError, did_you_mean
from hpcrl.trainer.models.adapter import PARTS, Adapted, Adapter, made_adapter, peft_config, together

if TYPE_CHECKING:
    import peft

_ADAPTER = "default"
_BASE, _LORA = re.compile(r"(\.base_layer)+\."), ".lora_"
_ALL, _BODY = "all-linear", "model."

_FURTHER, _ITERATIONS = 8, 8  # of PiSSA's decomposition: columns beyond the rank, and passes over the matrix

_Draw = Callable[[torch.Tensor, torch.Generator], object]
# Of A, [r, in]; B begins at 0, so that training begins with the model as it is. xavier and normal as in Megatron-Bridge, the others as in PEFT.
_DRAWN: dict[str, _Draw] = {
    "kaiming": lambda A, generator: nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator),
    "xavier": lambda A, generator: nn.init.xavier_normal_(A, generator=generator),
    "normal": lambda A, generator: nn.init.normal_(A, std=0.2, generator=generator),
    "gaussian": lambda A, generator: nn.init.normal_(A, std=1 / len(A), generator=generator),
}


def add_adapters(model: PreTrainedModel, lora: LoraConfig, role: str, dtype: torch.dtype, seed: int) -> None:
    """Freeze a model but for modules_to_save, and give it adapters; where it is on the meta device, they have no values either.

    Args:
        role: section of the model, for errors: trainer.policy or trainer.critic.
        dtype: of the adapters and of what is trained beside them.
        seed: of their first values.

    Raises:
        DataError: names of modules find nothing, or adapter_path has no adapters for them.
    """
    import peft

    model.requires_grad_(False)
    section = f"{role}.model.lora"
    kept = _whole_modules(model, lora, section)
    config = peft_config(lora, *_targets(model, lora, section, kept))
    # within a module, since of a model PEFT would take dense and shared layers beside experts for experts of older files
    holder = nn.ModuleDict({"model": model})
    peft.inject_adapter_in_model(config, holder, _ADAPTER, low_cpu_mem_usage=True)  # their values come below
    for name in kept:
        model.get_submodule(name).to(dtype).requires_grad_(True)
    for _, layer in _adapting(model):
        for matrix in _matrices(layer):
            matrix.to_empty(device=_adapted_parameter(layer).device).to(dtype)
    if model.device.type == "meta":
        return
    if lora.begins_from_weights:
        _take_from_weights(model, lora.init_method, seed)
        return
    for adapted, (A, B) in zip(adapted_layers(model), first_values(model, lora, seed, section), strict=True):
        adapted.A.data.copy_(A)
        adapted.B.data.copy_(B)


def _adapting(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in model.named_modules() if hasattr(layer, "base_layer"))


def _adapted_parameter(layer: Any) -> torch.Tensor:
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


def read_from_outside(model: nn.Module) -> set[nn.Module]:
    """Return the modules of experts, and adapters in between, whose parameters the adapter around them reads before it calls them."""
    return {layer.base_layer for _, layer in _adapting(model) if hasattr(layer, "parameter_name")}


def _of_each(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return a view [experts, out, in] of the weight that a layer adapts; one that is no experts' is as one expert's."""
    if weight.dim() == 2:
        return weight[None]
    return weight.transpose(1, 2) if getattr(layer.get_base_layer(), "is_transposed", False) else weight


def adapted_layers(model: nn.Module) -> Iterator[Adapted]:
    """Yield the layers that have adapters."""
    for name, layer in _adapting(model):
        a, b = _matrices(layer)
        parameter = getattr(layer, "parameter_name", "weight")
        experts = layer.num_experts if parameter != "weight" else 0
        weight = own_name(f"{name}.{parameter}")
        yield Adapted(name, a.weight, b.weight, layer.scaling[_ADAPTER], weight, experts)


def first_values(
    model: nn.Module, lora: LoraConfig, seed: int, section: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield A and B of each adapted layer, whole and on the CPU, as training begins with them.

    Args:
        section: of `lora`, for errors.
    """
    if lora.adapter_path is not None:
        yield from _given(list(adapted_layers(model)), Path(lora.adapter_path), section)
        return
    generator = torch.Generator().manual_seed(seed)
    for adapted in adapted_layers(model):
        A = torch.empty(adapted.A.shape, device="cpu")
        for one in A.split(adapted.rank):
            _DRAWN[lora.init_method](one, generator)
        yield A, torch.zeros(adapted.B.shape, device="cpu")


@torch.no_grad()
def _take_from_weights(model: nn.Module, method: str, seed: int) -> None:
    """Let adapters begin as the part of each matrix that a method finds, and leave the rest below them."""
    for adapted, (_, layer) in zip(adapted_layers(model), _adapting(model), strict=True):
        weight = _of_each(layer, _adapted_parameter(layer))
        parts = [part_of(W, adapted.rank, adapted.scaling, method, seed) for W in weight]
        A, B = together(*(torch.stack(matrices) for matrices in zip(*parts, strict=True)))
        adapted.A.copy_(A)
        adapted.B.copy_(B)
        A, B = (matrix.to(parts[0][0]) for matrix in adapted.of_each())  # as they are rounded
        weight.copy_(weight.to(A) - adapted.scaling * (B @ A))


@torch.no_grad()
def part_of(
    weight: torch.Tensor, rank: int, scaling: float, method: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B, float32 and on a GPU where there is one, so that s B A is the part of a matrix [out, in] that a method finds.

    pissa: the largest singular values (PiSSA, arXiv:2404.02948, equations 2 to 4), by a randomized decomposition (arXiv:0909.4061); olora:
    what the first columns span, s times (OLoRA, arXiv:2406.01775, algorithm 1, with the scale of PEFT).
    """
    W = weight.to("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    if method == "olora":
        B = torch.linalg.qr(W[:, :rank]).Q
        return B.T @ W, B
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        U, S, V = torch.svd_lowrank(W, min(rank + _FURTHER, *W.shape), _ITERATIONS)
    roots = (S[:rank] / scaling).sqrt()
    return roots[:, None] * V[:, :rank].T, U[:, :rank] * roots


def _given(layers: list[Adapted], directory: Path, section: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the values of other adapters, scaled to the same product here."""
    import peft
    from peft.utils.other import get_pattern_key

    try:
        tensors = load_file(directory / ADAPTER_FILE)  # first: PEFT asks the hub for a directory that is not there
        read_entries(directory / "adapter_config.json")
        theirs = cast("peft.LoraConfig", peft.LoraConfig.from_pretrained(str(directory)))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise DataError(f"{section}.adapter_path: {directory} has no adapters that PEFT reads: {error}") from error
    if not layers[0].name.startswith(_BODY):  # a critic's names begin with what is in the body
        tensors = {name.replace(f"{ADAPTER_PREFIX}{_BODY}", ADAPTER_PREFIX): value for name, value in tensors.items()}
    alphas = theirs.alpha_pattern or {}
    named = {each.name: [f"{ADAPTER_PREFIX}{each.name}{part}" for part in PARTS] for each in layers}
    if others := sorted(tensors.keys() ^ {name for pair in named.values() for name in pair}):
        raise DataError(
            f"{section}.adapter_path: {directory} adapts other modules, by {others[0].removeprefix(ADAPTER_PREFIX)}; set target_modules, "
            "exclude_modules and target_parameters to those of its adapter_config.json"
        )
    for layer, (name, pair) in zip(layers, named.items(), strict=True):
        A, B = (tensors[part] for part in pair)
        if (A.shape, B.shape) != (layer.A.shape, layer.B.shape):
            rank = len(A) // (layer.experts or 1)
            raise DataError(
                f"{section}.adapter_path: {directory} has rank {rank} and {A.shape[1]} inputs for {name}, and expected were rank "
                f"{layer.rank} and {layer.A.shape[1]}; set rank and rank_pattern to those of its adapter_config.json"
            )
        alpha = alphas.get(get_pattern_key(list(alphas), layer.matched), theirs.lora_alpha)
        scale = alpha / (math.sqrt(layer.rank) if theirs.use_rslora else layer.rank)
        yield A, B.float() * (scale / layer.scaling)


def _whole_modules(model: PreTrainedModel, lora: LoraConfig, section: str) -> list[str]:
    having = [
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    ]
    return _named(having, lora.modules_to_save or [], f"{section}.modules_to_save", "module with parameters")


def _targets(model: PreTrainedModel, lora: LoraConfig, section: str, kept: list[str]) -> tuple[list[str], list[str]]:
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    experts = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    wanted, left_out = lora.target_modules, lora.exclude_modules
    chosen = linear if wanted == _ALL else _named(linear, wanted, f"{section}.target_modules")
    of_experts = _named(experts, lora.target_parameters or [], f"{section}.target_parameters", "parameter of experts")
    excluded = [] if left_out is None else _named([*linear, *of_experts], left_out, f"{section}.exclude_modules")
    modules = [name for name in chosen if name not in {*excluded, *kept}]
    parameters = [name for name in of_experts if name not in excluded and name.rpartition(".")[0] not in kept]
    if not (modules or parameters):
        raise DataError(f"{section}: exclude_modules and modules_to_save leave no module to adapt; leave one")
    return modules, parameters


def _named(names: list[str], parts: str | list[str], setting: str, what: str = "linear layer") -> list[str]:
    parts = [parts] if isinstance(parts, str) else parts
    for part in parts:
        if not any(part in name for name in names):
            leaves = sorted({name.rpartition(".")[2] for name in names})
            hint = did_you_mean(part, leaves, 3, 0.3) or (
                f"; it has {', '.join(leaves)}" if leaves else "; it has none"
            )
            raise DataError(f'{setting} "{part}": the model has no {what} with that in its name{hint}')
    return [name for name in names if any(part in name for part in parts)]


def _matrices(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    return layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter of that name is one of an adapter."""
    return _LORA in name


def is_B(name: str) -> bool:
    """Return whether a parameter of that name is the B of an adapter."""
    return ".lora_B." in name


def own_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return _BASE.sub(".", name)


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield the parameters of a model without those of its adapters: name in the model without adapters, parameter, and the layer that adapts it or None."""
    layers = {id(_adapted_parameter(layer)): layer for _, layer in _adapting(model)}
    for name, parameter in model.named_parameters():
        if not is_of_adapter(name):
            yield own_name(name), parameter, layers.get(id(parameter))


def merging(layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that merges W + s B A, float32, for W, [out, in] or [experts, out, in]. All ranks call it, also where one merges.

    Args:
        layer: that adapts W.
        whole: gathers a parameter that may be sharded.
    """
    adapted = next(adapted_layers(layer))
    adapted = replace(adapted, A=whole(adapted.A.detach()).float(), B=whole(adapted.B.detach()).float())
    A, B = adapted.of_each()

    def merged(W: torch.Tensor) -> torch.Tensor:
        found = W.to(torch.float32, copy=True)
        _of_each(layer, found).add_(B @ A, alpha=adapted.scaling)
        return found

    return merged


def gather_adapter(
    model: PreTrainedModel, lora: LoraConfig, base: Pretrained, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Adapter:
    """Return the adapters of a model. All ranks call it.

    Args:
        base: the model that they adapt.
        whole: gathers a parameter that may be sharded.
    """

    def copied(parameter: torch.Tensor) -> torch.Tensor:
        return whole(parameter.detach()).to("cpu", copy=True)

    layers = [replace(each, A=copied(each.A), B=copied(each.B)) for each in adapted_layers(model)]
    named = model.named_parameters(remove_duplicate=False)  # PEFT ties no modules that it keeps whole: each has its own
    kept = {name: copied(value) for name, value in named if value.requires_grad and not is_of_adapter(name)}
    found = made_adapter(layers, lora, base, kept)
    return replace(found, config=replace(found.config, task_type="SEQ_CLS")) if gives_numbers(model) else found


def gives_numbers(model: PreTrainedModel) -> bool:
    """Return whether the head of a model gives one number, a value or a score, instead of logits."""
    head = model.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.out_features == 1


@contextmanager
def without_dropout(model: nn.Module, dropout: float) -> Iterator[None]:
    """Compute as in evaluation for a while; `dropout` is the adapters' probability, and the model's only one."""
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
    """Compute without adapters for a while."""
    layers = [layer for _, layer in _adapting(model)]
    for layer in layers:  # PEFT's enable_adapters would also freeze them
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
