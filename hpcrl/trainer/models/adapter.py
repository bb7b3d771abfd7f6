"""Whole adapters of a model: on the CPU, and as a directory that PEFT loads.

PEFT keeps the adapters of all experts of a matrix, [experts, in, out], in two matrices. The rows of A are the experts' one after the
other. The columns of B are those of all experts for the first of the r numbers, then for the second, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcrl.config.sections.model import LoraConfig, Pretrained
from hpcrl.data.weight_files import ADAPTER_FILE, ADAPTER_PREFIX, WeightFile

if TYPE_CHECKING:
    import peft


@dataclass(frozen=True)
class Adapted:
    """A linear layer, or the same matrix of all experts, with an adapter.

    Attributes:
        name: of the adapter in PEFT's files; that of the layer, but for experts.
        A, B: [r, in] and [out, r], or for experts [experts * r, in] and [out, r * experts].
        scaling: s.
        weight: name, in the model without adapters, of the parameter that is adapted.
        experts: how many; 0: a linear layer.
    """

    name: str
    A: torch.Tensor
    B: torch.Tensor
    scaling: float
    weight: str
    experts: int = 0

    @property
    def rank(self) -> int:
        return len(self.A) // (self.experts or 1)

    @property
    def matched(self) -> str:
        """What the names of rank_pattern and alpha_pattern are compared with."""
        return self.weight if self.experts else self.name

    def of_each(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [experts, r, in] and B [experts, out, r]; a linear layer is as one expert."""
        experts = self.experts or 1
        return self.A.view(experts, -1, self.A.shape[1]), self.B.view(len(self.B), -1, experts).permute(2, 0, 1)


def together(A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B as PEFT keeps them, of those of each expert, [experts, r, in] and [experts, out, r]."""
    return A.flatten(0, 1), B.permute(1, 2, 0).flatten(1)


@dataclass(frozen=True)
class Adapter:
    """The adapters of a model, whole and on the CPU, under the names that its layers have on the hub.

    Attributes:
        layers: each with its matrices.
        config: what PEFT reads beside them.
        whole: parameters that are trained whole beside them: of modules_to_save, and the head of a reward model.
    """

    layers: list[Adapted]
    config: peft.LoraConfig
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def scaled(self, dtype: torch.dtype) -> Adapter:
        """Return the same adapters with s = 1, in another type: vLLM knows one alpha for all layers, and no modules that are trained whole."""
        layers = [
            replace(each, A=each.A.to(dtype), B=(each.scaling * each.B).to(dtype), scaling=1.0) for each in self.layers
        ]
        rank = max(each.rank for each in layers)
        others = {each.matched: each.rank for each in layers if each.rank < rank}
        config = replace(
            self.config, r=rank, lora_alpha=rank, use_rslora=False, alpha_pattern=others, rank_pattern=others
        )
        return Adapter(layers, config, self.whole)

    def beyond(self, first: Adapter) -> Adapter:
        """Return adapters, of the rank of both together, that add what these do and other ones did not: to be used with the model before `first` was taken from it."""
        layers = []
        for each, other in zip(self.layers, first.layers, strict=True):
            (A, B), (first_A, first_B) = each.of_each(), other.of_each()
            A, B = together(torch.cat([A, first_A], 1), torch.cat([each.scaling * B, -other.scaling * first_B], 2))
            layers.append(replace(each, A=A, B=B, scaling=1.0))
        return replace(self, layers=layers).scaled(torch.float32)

    def write(self, directory: Path) -> dict[str, str]:
        """Write a directory that PEFT loads; return the digest of each tensor."""
        tensors = {
            f"{ADAPTER_PREFIX}{each.name}{part}": tensor
            for each in self.layers
            for part, tensor in zip(PARTS, (each.A, each.B), strict=True)
        }
        tensors |= {f"{ADAPTER_PREFIX}{name}": tensor for name, tensor in self.whole.items()}
        self.config.save_pretrained(str(directory))
        file = WeightFile(directory / ADAPTER_FILE, {name: tensor.to("meta") for name, tensor in tensors.items()})
        try:
            return {name: file.write(name, tensor) for name, tensor in tensors.items()}
        finally:
            file.close()


PARTS = (".lora_A.weight", ".lora_B.weight")


def made_adapter(
    layers: Iterable[Adapted], lora: LoraConfig, base: Pretrained, kept: dict[str, torch.Tensor] | None = None
) -> Adapter:
    """Return adapters, and parameters of modules that are trained whole, with what PEFT reads beside them."""
    layers, kept = list(layers), kept or {}
    modules = sorted({name.rpartition(".")[0] for name in kept})
    parameters = sorted(each.weight for each in layers if each.experts)
    linear = sorted(each.name for each in layers if not each.experts)
    return Adapter(layers, peft_config(lora, linear, parameters, base, modules or None), kept)


def peft_config(
    lora: LoraConfig,
    modules: list[str],
    parameters: list[str],
    base: Pretrained | None = None,
    kept: list[str] | None = None,
) -> peft.LoraConfig:
    """Return what PEFT makes adapters of, by the names of linear layers and of parameters of experts."""
    import peft  # takes half a second, and most runs have no adapters

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.path if base else None,
        revision=base.revision if base else None,
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        use_rslora=lora.use_rslora,
        alpha_pattern=lora.alpha_pattern,
        rank_pattern=lora.rank_pattern,
        modules_to_save=kept,
    )
