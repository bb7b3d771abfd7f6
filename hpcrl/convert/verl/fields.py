"""verl's settings (main_ppo, 2026): their names, their defaults, and what becomes of each here."""

from __future__ import annotations

from typing import Any

from hpcrl.convert.field_table import FieldTable

MEGATRON_DEFAULTS: dict[str, Any] = {
    "actor_rollout_ref.actor.strategy": "megatron",
    "critic.strategy": "megatron",
    "actor_rollout_ref.rollout.max_num_seqs": 1024,
    "actor_rollout_ref.actor.optim.optimizer": "adam",
    "critic.optim.optimizer": "adam",
}
"""Those that are others in verl's configuration for Megatron-core."""

_RENAMED = {
    "critic.model.fsdp_config.": "critic.fsdp.",
    "custom_reward_function.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.": "reward.reward_model.",
}

VERL = FieldTable.of("verl", "verl/fields.tsv", _RENAMED)
DEFAULTS, TARGETS = VERL.defaults, VERL.targets
