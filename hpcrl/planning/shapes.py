"""Shapes of the models that a trainer loads: built on the meta device, without their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from hpcrl.config.sections.model import CriticConfig, FSDPConfig, PolicyConfig, Pretrained
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.data.entries import check_files
from hpcrl.errors import DataError
from hpcrl.planning.memory import EMBEDDING, HEAD, Shapes, Weight, Width
from hpcrl.trainer.backends.fsdp.sharding import units, vocabulary_units
from hpcrl.trainer.models.build import critic_source, policy_source, reference_source
from hpcrl.trainer.models.experts.parallel import expert_layers
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.models.trainable import mark_trained


def model_shapes(trainer: TrainerConfig, folder_of: Callable[[Pretrained], Path | None]) -> dict[str, Shapes]:
    """Return the models of a trainer by their role: policy, ref and critic.

    Args:
        folder_of: a model -> the directory that has its config.json; None: it is on a hub, and is asked for there.
    """
    sources: dict[str, tuple[ModelSource, FSDPConfig, PolicyConfig | CriticConfig | None]] = {
        "policy": (policy_source(trainer), trainer.policy.fsdp_config, trainer.policy)
    }
    if trainer.colocated_reference and not trainer.reference_is_base:
        sources["ref"] = reference_source(trainer), trainer.ref_sharding, None
    if trainer.critic.model.path is not None:
        sources["critic"] = critic_source(trainer), trainer.critic.fsdp_config, trainer.critic
    return {
        role: shapes(replace(source, path=str(folder_of(source) or source.path)), fsdp, trained)
        for role, (source, fsdp, trained) in sources.items()
    }


def shapes(source: ModelSource, fsdp: FSDPConfig, trained: PolicyConfig | CriticConfig | None) -> Shapes:
    """Return a model's parameters and sizes.

    Args:
        trained: section with what is trained; None: nothing.
    """
    model = source.empty(torch.float32, PACKED)
    mark_trained(model, trained, torch.float32)
    layers = expert_layers(model, fsdp.expert_parallel_size) if fsdp.expert_parallel_size > 1 else []
    of_vocabulary = zip((EMBEDDING, HEAD), vocabulary_units(model, fsdp.wrap_policy), strict=True)
    inner = dict(enumerate(units(model, fsdp.wrap_policy), 1)) | {unit: each for unit, each in of_vocabulary if each}
    found, names = _shapes(model, inner), {id(p): name for name, p in model.named_parameters()}
    spread = {names[id(parameter)] for layer in layers for parameter in layer.parameters()}
    weights = [replace(each, spread=fsdp.expert_parallel_size if each.name in spread else 1) for each in found.weights]
    return replace(found, weights=weights)


def classifier_shapes(model: Pretrained) -> Shapes:
    """Return the parameters and sizes of a reward model that is served. Raises DataError where it is no sequence classifier."""
    try:
        check_files(model.path, **model.at_revision)
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=False, **model.at_revision)
        with torch.device("meta"):
            made = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"environment.remote_reward.service.model: {model} is no sequence classifier: {error}"
        ) from error
    return _shapes(made.requires_grad_(False), {})


def _shapes(model: PreTrainedModel, inner: Mapping[int, torch.nn.Module]) -> Shapes:
    unit_of: dict[torch.nn.Parameter, int] = {}
    for number, module in inner.items():
        for parameter in module.parameters():
            unit_of.setdefault(parameter, number)
    weights = [
        Weight(name, tuple(parameter.shape), parameter.requires_grad, unit_of.get(parameter, 0))
        for name, parameter in model.named_parameters()
    ]
    return Shapes(type(model).__name__, weights, _width(model))


def _width(model: PreTrainedModel) -> Width:
    text = model.config.get_text_config()
    heads, experts = text.num_attention_heads, getattr(text, "num_experts_per_tok", None)
    ffn = text.intermediate_size
    if experts:
        ffn = experts * (getattr(text, "moe_intermediate_size", None) or ffn)
        ffn += getattr(text, "shared_expert_intermediate_size", None) or 0
    return Width(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head=getattr(text, "head_dim", None) or text.hidden_size // heads,
        ffn=ffn,
        vocabulary=text.vocab_size,
        norms_heads=any(name.endswith(".q_norm.weight") for name, _ in model.named_parameters()),
    )
