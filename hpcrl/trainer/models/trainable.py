"""Trainable parameters of a model: all, some, or adapters."""

from __future__ import annotations

import re

import torch
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.sections.model import CriticConfig, PolicyConfig
from hpcrl.errors import DataError, did_you_mean
from hpcrl.trainer.models.lora import add_adapters, gives_numbers, own_name


def mark_trained(
    model: PreTrainedModel, section: PolicyConfig | CriticConfig | None, dtype: torch.dtype, seed: int = 0
) -> None:
    """Enable gradients of trained parameters; with LoRA add adapters.

    Args:
        section: that says it; None: nothing is trained.
        dtype: of what is trained beside a frozen model.
        seed: of the first values of adapters.
    """
    model.requires_grad_(section is not None)
    policy = isinstance(section, PolicyConfig)
    if section is not None and section.model.lora.rank:
        add_adapters(model, section.model.lora, "trainer.policy" if policy else "trainer.critic", dtype, seed)
        if gives_numbers(model):  # its head has learned nothing
            head = model.get_output_embeddings()
            assert head is not None
            head.to(dtype).requires_grad_(True)
    if policy:
        freeze(model, section.trainable_map, section.freeze_pattern)


def freeze(model: nn.Module, trainable_map: dict[str, bool], freeze_pattern: list[str]) -> None:
    """Stop or start the training of parameters: first what `trainable_map` names, in its order, then what a pattern finds.

    Args:
        trainable_map: full name of a parameter or module -> whether it is trained.
        freeze_pattern: regular expressions, searched in the names of parameters.

    Raises:
        DataError: the model has no such name, a pattern finds nothing, or nothing is left to train.
    """
    parameters = {own_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    for name, trained in trainable_map.items():
        if name not in parameters and name not in modules:
            raise _unknown(f"trainer.policy.trainable_map.{name}", name, [*modules, *parameters])
        (parameters[name] if name in parameters else modules[name]).requires_grad_(trained)
    for pattern in freeze_pattern:
        found = [name for name in parameters if re.search(pattern, name)]
        if not found:
            raise _unknown(f'trainer.policy.freeze_pattern "{pattern}"', pattern, list(parameters))
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise DataError("trainer.policy.trainable_map and freeze_pattern freeze every parameter; leave one to train")


def _unknown(what: str, name: str, known: list[str]) -> DataError:
    hint = did_you_mean(name, known, 3, 0.3) or f"; it has {', '.join(known[:3])}"
    return DataError(f"{what}: the model has nothing of that name{hint}")
