"""The models that the configuration names."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GenerationConfig

from hpcrl.config.derive import model_config_kwargs, ref_model_path
from hpcrl.config.trainer import TrainerConfig
from hpcrl.trainer.source import Source, ValueSource


def policy_source(trainer: TrainerConfig) -> Source:
    """Return the model that is trained, as it is loaded."""
    return Source(
        path=trainer.policy.model.path,
        role="trainer.policy",
        config_kwargs=model_config_kwargs(trainer.policy),
        rope_scaling=trainer.rope_scaling,
        rope_theta=trainer.rope_theta,
    )


def reference_source(trainer: TrainerConfig) -> Source:
    """Return the model of the KL term, as it is loaded."""
    return replace(
        policy_source(trainer),
        path=ref_model_path(trainer),
        role="trainer.ref",
        config_kwargs=model_config_kwargs(trainer.ref),
    )


def critic_source(trainer: TrainerConfig) -> ValueSource:
    """Return the critic, as it is loaded."""
    assert trainer.critic.model.path is not None, "this run has no critic"
    return ValueSource(
        path=trainer.critic.model.path,
        role="trainer.critic",
        config_kwargs=trainer.critic.model_config_kwargs,
        rope_scaling=trainer.rope_scaling,
        rope_theta=trainer.rope_theta,
        head=trainer.algorithm.value_head_prefix,
        seed=trainer.seed,
    )


def export_config(source: Source, directory: Path, dtype: torch.dtype) -> None:
    """Write what makes exported weights of a model one: its configuration, with their type, and generation settings."""
    config = source.config()
    config.dtype = dtype
    config.save_pretrained(directory)
    with suppress(OSError):  # a model need not have one
        GenerationConfig.from_pretrained(source.path).save_pretrained(directory)
