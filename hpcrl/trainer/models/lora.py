"""LoRA (arXiv:2106.09685): a frozen model with trained adapters of low rank, W x + s B A x, by PEFT.

PEFT puts a layer of its own in the place of each linear layer that gets an adapter: what was `q_proj.weight` is `q_proj.base_layer.weight` then,
and the adapter is `q_proj.lora_A.default.weight` [r, in] and `q_proj.lora_B.default.weight` [out, r].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.adapters import begins_from_weights
from hpcrl.config.sections.model import LoraConfig, Pretrained
from hpcrl.data.weight_files import ADAPTER_FILE, ADAPTER_PREFIX, WeightFile
from hpcrl.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import peft

_ADAPTER = "default"
_BASE, _LORA = ".base_layer.", ".lora_"
_ALL = "all-linear"
_PARTS = (".lora_A.weight", ".lora_B.weight")

_FURTHER, _ITERATIONS = 8, 8  # of PiSSA's decomposition: columns beyond the rank, and passes over the matrix

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
    targets = _targets(model, lora, section, kept)
    # their values come below
    peft.inject_adapter_in_model(_peft_config(lora, targets), model, _ADAPTER, low_cpu_mem_usage=True)
    for name in kept:
        model.get_submodule(name).to(dtype).requires_grad_(True)
    for name in targets:
        layer = model.get_submodule(name)
        device = next(layer.base_layer.parameters()).device  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        for matrix in _matrices(layer):
            matrix.to_empty(device=device).to(dtype)
    if model.device.type == "meta":
        return
    if begins_from_weights(lora):
        _take_from_weights(model, lora.init_method, seed)
        return
    for adapted, (A, B) in zip(adapted_layers(model), first_values(model, lora, seed, section), strict=True):
        adapted.A.data.copy_(A)
        adapted.B.data.copy_(B)


def adapted_layers(model: nn.Module) -> Iterator[Adapted]:
    """Yield the layers that have adapters."""
    for name, layer in model.named_modules():
        if hasattr(layer, "base_layer"):
            adapter: Any = layer
            a, b = _matrices(adapter)
            yield Adapted(name, a.weight, b.weight, adapter.scaling[_ADAPTER])


def first_values(
    model: nn.Module, lora: LoraConfig, seed: int, section: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield A and B of each adapted layer, whole and on the CPU, as training begins with them.

    Args:
        section: of `lora`, for errors.

    Raises:
        DataError: adapter_path has no adapters for them.
    """
    if lora.adapter_path is not None:
        yield from _given(list(adapted_layers(model)), Path(lora.adapter_path), section)
        return
    generator = torch.Generator().manual_seed(seed)
    for adapted in adapted_layers(model):
        A = torch.empty(adapted.A.shape, device="cpu")
        _DRAWN[lora.init_method](A, generator)
        yield A, torch.zeros(adapted.B.shape, device="cpu")


@torch.no_grad()
def _take_from_weights(model: nn.Module, method: str, seed: int) -> None:
    """Let adapters begin as the part of each matrix that a method finds, and leave the rest below them."""
    for adapted in adapted_layers(model):
        base: nn.Linear = model.get_submodule(adapted.name).base_layer  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
        A, B = part_of(base.weight, len(adapted.A), adapted.scaling, method, seed)
        adapted.A.copy_(A)
        adapted.B.copy_(B)
        part = adapted.scaling * (adapted.B.to(B) @ adapted.A.to(A))  # as they are rounded
        base.weight.copy_(base.weight.to(part) - part)


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
    """Yield the values of other adapters, scaled so that they do the same here."""
    import peft
    from peft.utils.other import get_pattern_key

    try:
        tensors = load_file(directory / ADAPTER_FILE)  # first: PEFT asks the hub for a directory that is not there
        theirs = cast("peft.LoraConfig", peft.LoraConfig.from_pretrained(str(directory)))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{section}.adapter_path: {directory} has no adapters that PEFT reads: {error}") from error
    alphas = theirs.alpha_pattern or {}
    named = {name: [f"{ADAPTER_PREFIX}{name}{part}" for part in _PARTS] for name in (each.name for each in layers)}
    if others := sorted(tensors.keys() ^ {name for pair in named.values() for name in pair}):
        raise DataError(
            f"{section}.adapter_path: {directory} adapts other modules, by {others[0].removeprefix(ADAPTER_PREFIX)}; set target_modules and "
            "exclude_modules to those of its adapter_config.json"
        )
    for layer, (name, pair) in zip(layers, named.items(), strict=True):
        A, B = (tensors[part] for part in pair)
        if (A.shape, B.shape) != (layer.A.shape, layer.B.shape):
            raise DataError(
                f"{section}.adapter_path: {directory} has rank {len(A)} and {A.shape[1]} inputs for {name}, and expected were rank "
                f"{len(layer.A)} and {layer.A.shape[1]}; set rank and rank_pattern to those of its adapter_config.json"
            )
        alpha = alphas.get(get_pattern_key(list(alphas), name), theirs.lora_alpha)
        scale = alpha / (math.sqrt(len(A)) if theirs.use_rslora else len(A))
        yield A, B.float() * (scale / layer.scaling)


def _peft_config(
    lora: LoraConfig, targets: list[str], base: Pretrained | None = None, kept: list[str] | None = None
) -> peft.LoraConfig:
    import peft  # takes half a second, and most runs have no adapters

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.path if base else None,
        revision=base.revision if base else None,
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        alpha_pattern=lora.alpha_pattern,
        rank_pattern=lora.rank_pattern,
        modules_to_save=kept,
    )


def _whole_modules(model: PreTrainedModel, lora: LoraConfig, section: str) -> list[str]:
    """Return the modules that are trained whole: those with parameters of their own that modules_to_save names."""
    having = [
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    ]
    return _named(having, lora.modules_to_save or [], f"{section}.modules_to_save", "module with parameters")


def _targets(model: PreTrainedModel, lora: LoraConfig, section: str, kept: list[str]) -> list[str]:
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    wanted, left_out = lora.target_modules, lora.exclude_modules
    chosen = linear if wanted == _ALL else _named(linear, wanted, f"{section}.target_modules")
    excluded = [] if left_out is None else _named(linear, left_out, f"{section}.exclude_modules")
    if not (targets := [name for name in chosen if name not in {*excluded, *kept}]):
        raise DataError(f"{section}: exclude_modules and modules_to_save leave no module to adapt; leave one")
    return targets


def _named(names: list[str], parts: str | list[str], setting: str, what: str = "linear layer") -> list[str]:
    parts = [parts] if isinstance(parts, str) else parts
    for part in parts:
        if not any(part in name for name in names):
            leaves = sorted({name.rpartition(".")[2] for name in names})
            hint = did_you_mean(part, leaves, 3, 0.3) or f"; it has {', '.join(leaves)}"
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
    return name.replace(_BASE, ".")


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield the parameters of a model without those of its adapters: name in the model without adapters, parameter, and the layer that adapts it or None."""
    for name, parameter in model.named_parameters():
        owner, is_base, leaf = name.rpartition(_BASE)
        if is_base:
            yield own_name(name), parameter, model.get_submodule(owner) if leaf == "weight" else None
        elif not is_of_adapter(name):
            yield name, parameter, None


def merging(layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes W + s B A, float32, of W, [out, in]. All ranks call it, whoever merges.

    Args:
        layer: that adapts W.
        whole: gathers a parameter that may be sharded.
    """
    A, B = (whole(matrix.weight.detach()).float() for matrix in _matrices(layer))
    return lambda W: W.float() + layer.scaling[_ADAPTER] * (B @ A)


@dataclass(frozen=True)
class Adapter:
    """The adapters of a model, whole and on the CPU, under the names that its layers have on the hub.

    Attributes:
        matrices: A [r, in] and B [out, r] of each layer.
        scales: s of each layer.
        config: what PEFT reads beside them.
        whole: parameters that are trained whole beside them: of modules_to_save, and the head of a reward model.
    """

    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scales: dict[str, float]
    config: peft.LoraConfig
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def scaled(self, dtype: torch.dtype) -> Adapter:
        """Return the same adapters with s = 1, in another type: vLLM knows one alpha for all layers, and no modules that are trained whole."""
        matrices = {name: (A.to(dtype), (self.scales[name] * B).to(dtype)) for name, (A, B) in self.matrices.items()}
        rank = max(len(A) for A, _ in matrices.values())
        others = {name: len(A) for name, (A, _) in matrices.items() if len(A) < rank}
        config = replace(
            self.config, r=rank, lora_alpha=rank, use_rslora=False, alpha_pattern=others, rank_pattern=others
        )
        return Adapter(matrices, dict.fromkeys(matrices, 1.0), config, self.whole)

    def beyond(self, first: Adapter) -> Adapter:
        """Return adapters, of the rank of both together, that add what these do and other ones did not: to be used with the model before `first` was taken from it."""
        matrices = {
            name: (
                torch.cat([A, first.matrices[name][0]]),
                torch.cat([self.scales[name] * B, -first.scales[name] * first.matrices[name][1]], 1),
            )
            for name, (A, B) in self.matrices.items()
        }
        return replace(self, matrices=matrices, scales=dict.fromkeys(matrices, 1.0)).scaled(torch.float32)

    def write(self, directory: Path) -> dict[str, str]:
        """Write a directory that PEFT loads; return the digest of each tensor.

        Raises:
            OSError: it cannot be written.
        """
        named = [(f"{ADAPTER_PREFIX}{name}", *matrices) for name, matrices in self.matrices.items()]
        tensors = {f"{name}{part}": tensor for name, *both in named for part, tensor in zip(_PARTS, both, strict=True)}
        tensors |= {f"{ADAPTER_PREFIX}{name}": tensor for name, tensor in self.whole.items()}
        self.config.save_pretrained(str(directory))
        file = WeightFile(directory / ADAPTER_FILE, {name: tensor.to("meta") for name, tensor in tensors.items()})
        try:
            return {name: file.write(name, tensor) for name, tensor in tensors.items()}
        finally:
            file.close()


def gather_adapter(
    model: PreTrainedModel, lora: LoraConfig, base: Pretrained, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Adapter:
    """Return the adapters of a model. All ranks call it.

    Args:
        base: the model that they adapt.
        whole: gathers a parameter that may be sharded.
    """
    layers = list(adapted_layers(model))

    def copied(parameter: torch.Tensor) -> torch.Tensor:
        return whole(parameter.detach()).to("cpu", copy=True)

    matrices = {each.name: (copied(each.A), copied(each.B)) for each in layers}
    named = model.named_parameters(remove_duplicate=False)  # PEFT ties no modules that it keeps whole: each has its own
    kept = {name: copied(value) for name, value in named if value.requires_grad and not is_of_adapter(name)}
    found = made_adapter(matrices, {each.name: each.scaling for each in layers}, lora, base, kept)
    return replace(found, config=replace(found.config, task_type="SEQ_CLS")) if gives_numbers(model) else found


def gives_numbers(model: PreTrainedModel) -> bool:
    """Return whether the head of a model gives one number, a value or a score, instead of logits."""
    head = model.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.out_features == 1


def made_adapter(
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]],
    scales: dict[str, float],
    lora: LoraConfig,
    base: Pretrained,
    kept: dict[str, torch.Tensor] | None = None,
) -> Adapter:
    """Return adapters, and parameters of modules that are trained whole, with what PEFT reads beside them."""
    kept = kept or {}
    modules = sorted({name.rpartition(".")[0] for name in kept})
    return Adapter(matrices, scales, _peft_config(lora, sorted(matrices), base, modules or None), kept)


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
