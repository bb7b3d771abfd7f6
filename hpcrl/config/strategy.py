"""Rules about trainer.strategy: which settings say something to the backend that it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.config.model import PolicyConfig
from hpcrl.config.problem import Problem
from hpcrl.config.trainer import TrainerConfig

if TYPE_CHECKING:
    from hpcrl.config.root import Config

_OF_FSDP = {
    "policy.fsdp_config": ", and see trainer.policy.megatron_config, whose dtype is the type of computation",
    "ref.fsdp_config": ", and see trainer.ref.megatron_config",
    "critic.fsdp_config": ": a critic is split as trainer.policy.megatron_config says",
    "policy.sequence_parallel_size": ", and see trainer.policy.megatron_config.context_parallel_size",
    "ref.sequence_parallel_size": ", and see trainer.ref.megatron_config.context_parallel_size",
    "critic.sequence_parallel_size": ": a critic is split as trainer.policy.megatron_config says",
    "policy.use_torch_compile": "",
    "policy.optimizer_config.implementation": ": the optimizer is Megatron-core's",
    "critic.optimizer_config.implementation": ": the optimizer is Megatron-core's",
    "use_sample_packing": ": samples are always packed",
    "flash_attn": ": attention is TransformerEngine's, or torch's",
    "gradient_checkpointing_use_reentrant": ", and see trainer.policy.megatron_config.transformer_config_kwargs",
}
_OF_MEGATRON = {"policy.megatron_config": "", "ref.megatron_config": ""}


def strategy(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.strategy == "fsdp":
        for name in ("policy", "critic"):
            if getattr(trainer, name).fsdp_config.cpu_offload:
                yield Problem(
                    f"trainer.{name}.fsdp_config.cpu_offload",
                    "FSDP1 cannot train offloaded parameters; use trainer.strategy=fsdp2",
                )


def without_effect(config: Config) -> Iterator[Problem]:
    """Settings that say how the other backend works."""
    trainer = config.trainer
    fresh = TrainerConfig(policy=PolicyConfig(model=trainer.policy.model))
    idle = _OF_FSDP if trainer.strategy == "megatron" else _OF_MEGATRON
    for path, instead in idle.items():
        if _at(trainer, path) != _at(fresh, path):
            yield Problem(
                f"trainer.{path}", f"has no effect with trainer.strategy={trainer.strategy}; leave it out{instead}"
            )


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value
