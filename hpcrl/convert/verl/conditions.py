"""Which of verl's settings had an effect in its run."""

from __future__ import annotations

from hpcrl.convert.verl.source import VerlSource


def without_effect(source: VerlSource, path: str) -> str:
    """Return why a setting did nothing in verl's run; empty: it did."""
    megatron = source["actor_rollout_ref.actor.strategy"] == "megatron"
    if path.startswith("critic.") and not has_critic(source):
        return "had no effect, there is a critic only with algorithm.adv_estimator=gae"
    if path.startswith("actor_rollout_ref.ref.") and not has_reference(source):
        return "had no effect, there is a reference model only with a KL term"
    if ".megatron." in path and not megatron:
        return "had no effect without Megatron-core"
    if (".fsdp_config." in path or ".fsdp." in path) and megatron:
        return "had no effect with Megatron-core"
    return ""


def has_critic(source: VerlSource) -> bool:
    """Return whether verl's run has a critic."""
    enabled = source["critic.enable"]
    return source["algorithm.adv_estimator"] == "gae" if enabled is None else bool(enabled)


def has_reference(source: VerlSource) -> bool:
    """Return whether verl's run has a reference model."""
    return bool(source["actor_rollout_ref.actor.use_kl_loss"] or source["algorithm.use_kl_in_reward"])
