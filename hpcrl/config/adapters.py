"""What follows from the settings of LoRA: which adapters there are, what engines get of them, and what the reference is beside them."""

from __future__ import annotations

from hpcrl.config.derive import (
    has_engines,
    model_config_kwargs,
    policy_model,
    ref_model,
    ref_sharding,
    self_teacher,
    uses_reference,
)
from hpcrl.config.sections.model import LoraConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree


def adapters(trainer: TrainerConfig) -> dict[str, LoraConfig]:
    """Return the settings of adapters by the role of the models that are trained with some: policy, critic."""
    found = {"policy": trainer.policy.model.lora, "critic": trainer.critic.model.lora}
    return {role: lora for role, lora in found.items() if lora.rank > 0}


def begins_from_weights(lora: LoraConfig) -> bool:
    """Return whether adapters begin as a part of the weights below them, which begin without that part."""
    return lora.rank > 0 and lora.init_method in ("olora", "pissa") and lora.adapter_path is None


def largest_rank(lora: LoraConfig) -> int:
    return max(lora.rank, *lora.rank_pattern.values(), 0)


def loads_adapters(config: ConfigTree) -> bool:
    """Return whether engines get the policy's adapters after each step, instead of the whole policy."""
    lora, merged = config.trainer.policy.model.lora, config.generator.inference_engine.merge_lora
    return has_engines(config) and lora.rank > 0 and not merged and engines_load(lora)


def engines_load(lora: LoraConfig) -> bool:
    """Return whether engines can load adapters of this kind."""
    return not (lora.modules_to_save or lora.target_parameters or begins_from_weights(lora))


def begins_with_model(trainer: TrainerConfig) -> bool:
    """Return whether version 0 of the policy is the model where it lies, and need not be published."""
    lora = trainer.policy.model.lora
    return lora.rank == 0 or not (lora.adapter_path is not None or begins_from_weights(lora))


def engines_begin_with_model(config: ConfigTree) -> bool:
    """Return whether engines hold version 0 when they start. Those that somebody else started may hold anything, and get it as any other."""
    return begins_with_model(config.trainer) and not config.generator.inference_engine.remote_urls


def reference_is_base(trainer: TrainerConfig) -> bool:
    """Return whether the reference is the policy with other adapters, or none, and needs no second model."""
    policy, ref = trainer.policy, trainer.ref
    if trainer.strategy == "megatron":
        own = ref.megatron_config.dtype != policy.megatron_config.dtype
    else:
        own = ref_sharding(trainer).mixed_precision.param_dtype != policy.fsdp_config.mixed_precision.param_dtype
    same = ref_model(trainer) == policy_model(trainer) and model_config_kwargs(ref) == model_config_kwargs(policy)
    return policy.model.lora.rank > 0 and same and not own


def reference_follows(trainer: TrainerConfig) -> bool:
    """Return whether the policy of later steps becomes the reference."""
    resets = trainer.algorithm.reference_reset_interval is not None or trainer.update_ref_every_epoch
    return resets or self_teacher(trainer) == "ema"


def reference_has_values(trainer: TrainerConfig) -> bool:
    """Return whether what is trained of the policy is kept a second time, with the values that it has in the reference."""
    lora = trainer.policy.model.lora
    apart = reference_follows(trainer) or bool(lora.modules_to_save) or begins_from_weights(lora)
    return uses_reference(trainer) and reference_is_base(trainer) and apart
