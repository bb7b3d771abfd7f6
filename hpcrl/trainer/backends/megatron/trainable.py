"""Trainable parameters of a model: all, some, or adapters; and the groups that they learn in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from transformers import PreTrainedModel

from hpcrl.config.sections.model import CriticConfig, OptimizerConfig, PolicyConfig
from hpcrl.errors import DataError
from hpcrl.trainer.backends.megatron.adapters.add import add_adapters, take_from_weights
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.names import hf_names, name_in_memory, table_name
from hpcrl.trainer.backends.megatron.shard_layout import shard_layout
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models import trainable as by_transformers
from hpcrl.trainer.models.adapter import Adapted
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.lora import own_name
from hpcrl.trainer.models.parameter_groups import parameter_groups


def mark_trained(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    source: ModelSource,
    section: PolicyConfig | CriticConfig,
    world: World,
    *,
    lora_type: str = "lora",
    seed: int = 0,
) -> None:
    """Freeze parameters and add adapters, as hpcrl.trainer.models.trainable.mark_trained, whose names and errors these are.

    Args:
        lora_type: trainer.policy.megatron_config.lora_type.
        seed: of the first values of adapters.

    Raises:
        DataError: as there; or a part of a parameter would be trained, but not all of it; or Megatron-core cannot adapt what is named.
    """
    lora, policy = section.model.lora, isinstance(section, PolicyConfig)
    frozen = isinstance(section, PolicyConfig) and (section.trainable_map or section.freeze_pattern)
    if not (lora.rank or frozen):
        return

    path, shared = f"{'trainer.policy' if policy else 'trainer.critic'}.model.lora", lora_type == "lora"
    adapted: dict[str, Adapted] = {}

    def apply() -> None:
        model = source.empty(torch.float32, "eager")
        by_transformers.mark_trained(model, section, torch.float32)
        named = (
            f"{path}.modules_to_save names" if lora.rank else "trainer.policy.trainable_map and freeze_pattern leave"
        )
        _freeze(chunks, architecture, model, named)
        if lora.rank:
            adapted.update(add_adapters(chunks, architecture, model, lora, path, seed, shared=shared))

    world.all_gather(apply)
    if lora.begins_from_weights:
        take_from_weights(chunks, architecture, adapted, lora, seed, world, shared=shared)


def _freeze(chunks: Sequence[GPTModel], architecture: Architecture, model: PreTrainedModel, named: str) -> None:
    """Train the parameters of this rank of which transformers' model trains all tensors.

    Args:
        named: which settings leave what to be trained, for errors.
    """
    trained = {
        table_name(own_name(name)): value.requires_grad
        for name, value in model.named_parameters(remove_duplicate=False)
    }
    for parameter, names in hf_names(chunks, architecture).items():
        frozen = [name for name in names if not trained[name_in_memory(name)]]
        if frozen and len(frozen) < len(names):
            left = [name for name in names if name not in frozen]
            raise DataError(
                f"{named} {', '.join(left[:3])} to be trained, but not all of {', '.join(names[:3])}{' …' if len(names) > 3 else ''}, which "
                "trainer.strategy=megatron keeps as one parameter; let all of them be trained or none, or use trainer.strategy=fsdp2"
            )
        parameter.requires_grad_(not frozen)


def group_overrides(
    chunks: Sequence[GPTModel], architecture: Architecture, optimizer: OptimizerConfig, role: str, world: World
) -> dict[ParamKey, Any]:
    """Return Megatron-core's options of parameters that are in a group of `optimizer`. All ranks call it.

    Raises:
        DataError: as `parameter_groups`; or a part of a parameter is in a group, but not all of it.
    """
    if not optimizer.groups:
        return {}
    names = {
        parameter: list(dict.fromkeys(place.name for place in places))
        for parameter, places in shard_layout(chunks, architecture).items()
        if parameter.requires_grad
    }
    overrides = dict[ParamKey, Any]()
    every = world.all_gather(lambda: [name for own in names.values() for name in own])

    def apply() -> None:
        trained = dict.fromkeys(name for of_rank in every for name in of_rank)
        for number, group in enumerate(parameter_groups(trained, optimizer, role)):
            found = {parameter for parameter, own in names.items() if _in_one(group.names, own, role)}
            overrides[ParamKey(predicate=ParamPredicate(str(number), found.__contains__))] = {
                "lr_mult": group.lr_factor,
                "weight_decay": group.weight_decay,
            }

    world.all_gather(apply)
    return overrides


def _in_one(group: Collection[str], names: Sequence[str], role: str) -> bool:
    inside = [name for name in names if name in group]
    if inside and len(inside) < len(names):
        raise DataError(
            f"{role}.optimizer_config.groups: {', '.join(names[:3])}{' …' if len(names) > 3 else ''} are one parameter with "
            f"trainer.strategy=megatron, and {inside[0]} is in another group than others of them; match all of them or none, or use "
            "trainer.strategy=fsdp2"
        )
    return bool(inside)
