"""Conditions under which settings have an effect, shared by several sections."""

from __future__ import annotations

from hpcrl.config.setting import When, any_of, when

RL = when("trainer.mode", "rl")
SFT = when("trainer.mode", "sft")
RL_OR_SFT = when("trainer.mode", "rl", "sft")
PAIRS = when("trainer.mode", "dpo", "reward_model")
OFFLINE = when("trainer.mode", "sft", "dpo", "reward_model")
ENGINES = any_of(RL, when("has_engines"), needs='data.val_prompts, or trainer.mode="rl"')
CRITIC = when("trainer.critic.model.path")


def chosen(name: str, *values: str) -> When:
    """Return the condition that a setting of the same section names one of some functions."""
    return when(f".{name}", *values, needs=f"{{section}}.{name}={' or '.join(values)}")
