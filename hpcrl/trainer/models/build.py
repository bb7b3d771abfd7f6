"""The trainer's models as they are loaded, and their forward passes, by the settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpcrl.config.rules.determinism import has_bits_of_engine
from hpcrl.config.scorers import REWARD, TEACHER, ScorerSet
from hpcrl.config.sections.reward_model import HEAD
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.trainer.models.forward import DTYPES, ForwardConfig
from hpcrl.trainer.models.hf import CriticSource, JudgeSource, ModelSource, RewardModelSource


def forward_config(trainer: TrainerConfig, temperature: float = 1.0) -> ForwardConfig:
    return ForwardConfig(
        temperature=temperature,
        chunk_rows=trainer.logprobs_chunk_size,
        packing=trainer.use_sample_packing,
        flash=trainer.flash_attn,
        flash_version=trainer.flash_attn_version,
        in_blocks=has_bits_of_engine(trainer),
        compiled=bool(trainer.policy.use_torch_compile),
        dtype=DTYPES[trainer.algorithm.logprob_dtype],
        entropy_loss=trainer.algorithm.use_entropy_loss,
    )


def policy_source(trainer: TrainerConfig) -> ModelSource:
    """Return the source of the trained model: a policy, or a reward model in its place."""
    section: dict[str, Any] = {
        **vars(trainer.policy.model.pretrained),
        "role": "trainer.policy",
        "config_kwargs": trainer.policy.config_overrides,
        "rope_scaling": trainer.rope_scaling,
        "rope_theta": trainer.rope_theta,
    }
    if trainer.trains_reward_model:
        return RewardModelSource(**section, head=HEAD, seed=trainer.seed)
    return ModelSource(**section)


def reference_source(trainer: TrainerConfig, policy: ModelSource | None = None) -> ModelSource:
    """Return the source of the reference: the policy's own unless another is configured."""
    return replace(
        policy or policy_source(trainer),
        **vars(trainer.ref_model),
        role="trainer.ref",
        config_kwargs=trainer.ref.config_overrides,
    )


def scorer_source(trainer: TrainerConfig, scorers: ScorerSet) -> ModelSource:
    """Return the model of scorers, as it is loaded."""
    if scorers.role == REWARD:
        return JudgeSource(**vars(scorers.model), role="environment.reward_model", head=HEAD, seed=0)
    if scorers.role != TEACHER:
        return reference_source(trainer)
    return replace(policy_source(trainer), **vars(scorers.model), role="trainer.distillation", config_kwargs={})


def critic_source(trainer: TrainerConfig) -> CriticSource:
    """Return the critic, as it is loaded."""
    model = trainer.critic.model.pretrained
    assert model is not None, "this run has no critic"
    return CriticSource(
        **vars(model),
        role="trainer.critic",
        config_kwargs=trainer.critic.model_config_kwargs,
        rope_scaling=trainer.rope_scaling,
        rope_theta=trainer.rope_theta,
        head=trainer.algorithm.value_head_prefix,
        seed=trainer.seed,
    )
