"""Which settings wait for a feature that is still to be built, and which defaults differ from SkyRL's, with the reason.

A setting that waits is accepted at its default only. This is the one place that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpcrl.config.problem import Problem, shown
from hpcrl.config.surface import Setting, leaves


@dataclass(frozen=True)
class Wait:
    """Why a setting, or all settings of a section, cannot be changed yet.

    Attributes:
        feature: what is still to be built.
        works: the values that have their effect already, beside the default.
    """

    feature: str
    works: tuple[Any, ...] = ()


_ALGORITHMS = Wait("the algorithm library")
_DATA = Wait("datasets on a hub and other columns")
_LORA = Wait("LoRA")
_PARALLEL = Wait("sequence parallelism")
_SFT = Wait("supervised fine-tuning")
_SPEED = Wait("compiled, offloaded and low-precision training")
_TRACKING = Wait("trackers, profiles and uploads")
_ENGINE = Wait("further engine options")

WAITS: dict[str, Wait] = {
    "data.subset": _DATA,
    "data.revision": _DATA,
    "data.val_subset": _DATA,
    "data.val_revision": _DATA,
    "data.local_dir": _DATA,
    "data.conversation_column": _SFT,
    "data.cache": _DATA,
    "data.num_workers": _DATA,
    "data.prefetch_factor": _DATA,
    "data.drop_last": _DATA,
    "trainer.mode": _SFT,
    "trainer.max_length": _SFT,
    "trainer.strategy": Wait("FSDP1", ("megatron",)),
    "trainer.sequence_parallel_backend": _PARALLEL,
    "trainer.group_name": _TRACKING,
    "trainer.logger": _TRACKING,
    "trainer.placement.critic_num_nodes": Wait("a critic on GPUs of its own"),
    "trainer.placement.critic_num_gpus_per_node": Wait("a critic on GPUs of its own"),
    "trainer.placement.ref_num_nodes": Wait("a reference model on GPUs of its own"),
    "trainer.placement.ref_num_gpus_per_node": Wait("a reference model on GPUs of its own"),
    "trainer.placement.colocate_policy_ref": Wait("a reference model on GPUs of its own"),
    "trainer.placement.colocate_all": Wait("colocated engines"),
    "trainer.policy.model.revision": Wait("models by revision"),
    "trainer.policy.model.lora": _LORA,
    "trainer.policy.optimizer_config.offload_after_step": Wait("colocated engines"),
    "trainer.policy.fsdp_config.mixed_precision.param_dtype": Wait("loss scaling", ("fp32",)),
    "trainer.policy.megatron_config.lora_type": _LORA,
    "trainer.policy.low_precision": _SPEED,
    "trainer.policy.diffusers": Wait("diffusion models"),
    "trainer.policy.sequence_parallel_size": _PARALLEL,
    "trainer.policy.compile_model": _SPEED,
    "trainer.policy.async_tensor_parallel": _SPEED,
    "trainer.policy.activation_offload": _SPEED,
    "trainer.policy.enable_liger_kernel": _SPEED,
    "trainer.policy.record_memory": _TRACKING,
    "trainer.ref.sequence_parallel_size": _PARALLEL,
    "trainer.critic.model.lora": _LORA,
    "trainer.critic.optimizer_config.offload_after_step": Wait("colocated engines"),
    "trainer.critic.fsdp_config.mixed_precision.param_dtype": Wait("loss scaling", ("fp32",)),
    "trainer.critic.sequence_parallel_size": _PARALLEL,
    "trainer.distillation": Wait("distillation"),
    "trainer.profiler.enable_nsys": _TRACKING,
    "trainer.upload": _TRACKING,
    "trainer.flash_attn_version": Wait("a choice between versions of FlashAttention"),
    "generator.inference_engine.quantization": Wait("engines that quantize weights as they arrive"),
    "generator.inference_engine.pipeline_parallel_size": Wait("replicas that share their layers among GPUs"),
    "generator.inference_engine.data_parallel_size": _ENGINE,
    "generator.inference_engine.expert_parallel_size": _ENGINE,
    "generator.inference_engine.weight_sync_backend": Wait("weights pushed over NCCL"),
    "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB": Wait("colocated engines"),
    "generator.inference_engine.fully_sharded_loras": _LORA,
    "vla": Wait("vision-language-action models"),
}


def wait_of(path: str) -> Wait | None:
    """Return what the setting at a dotted path waits for, or None where it has its effect."""
    while path:
        if path in WAITS:
            return WAITS[path]
        path = path.rpartition(".")[0]
    return None


def waiting(given: Iterable[tuple[Setting, Any]]) -> Iterator[Problem]:
    """Yield a problem for each setting that waits and is changed nevertheless.

    The settings and defaults are hpcrl's own: a user's subclass may add others, which wait for nothing.
    """
    from hpcrl.config.root import Config

    own = {setting.path: setting for setting in leaves(Config)}
    for found, value in given:
        setting, wait = own.get(found.path), wait_of(found.path)
        if setting and wait and not setting.is_default(value) and value not in wait.works:
            yield Problem(
                setting.path, f"{shown(value)} is not available yet ({wait.feature}); {_instead(setting, wait)}"
            )


def _instead(setting: Setting, wait: Wait) -> str:
    working = (setting.default, *wait.works)
    values = [shown(value) for value in working if value not in (None, [], "") and not isinstance(value, dict)]
    return f"what works: {', '.join(values)}" if values else "leave it out"


_AS_POLICY = "unset follows the policy's placement; SkyRL's 1 is wrong as soon as the policy has more"
_AS_TRAINING = (
    "unset is as in training; SkyRL falls back to fixed values as soon as one setting of the section is given"
)
_EMPTY = "an empty table says what SkyRL's null says"
_USERS_OWN = "what a run learns from is the user's to name; SkyRL's default is a path in its authors' setup"

# Dotted path -> why the default is not SkyRL's.
DEFAULTS: dict[str, str] = {
    "data.train_data": _USERS_OWN,
    "data.val_data": _USERS_OWN,
    "trainer.policy.model.path": "which model is trained is the user's to name",
    "trainer.placement.colocate_all": "trainer and engines have nodes of their own",
    "trainer.placement.critic_num_nodes": _AS_POLICY,
    "trainer.placement.critic_num_gpus_per_node": _AS_POLICY,
    "trainer.placement.ref_num_nodes": _AS_POLICY,
    "trainer.placement.ref_num_gpus_per_node": _AS_POLICY,
    "trainer.fully_async.max_staleness_steps": "one loop serves both kinds of training, and without a word it is on-policy; SkyRL reads its 4 only in a program of its own",
    "trainer.fully_async.num_parallel_generation_workers": "unset follows from batch size and staleness; SkyRL's 768 fits one batch size only",
    "trainer.project_name": "it is a directory of hpcrl's runs",
    "trainer.run_name": "a run is a directory, so two runs cannot share SkyRL's one name",
    "trainer.logger": "needs neither an account nor a network",
    "trainer.profiler.ranks": "a profile of no rank would be empty; SkyRL's megatron_config.torch_profiler_config.ranks is []",
    "trainer.ref.fsdp_config.mixed_precision.param_dtype": "the reference computes as the policy, unless it says otherwise",
    "trainer.rope_scaling": _EMPTY,
    "generator.rope_scaling": _EMPTY,
    "generator.sampling_params.additional_kwargs": _EMPTY,
    "generator.inference_engine.weight_sync_backend": "weights are files that every replica can read, later ones and those of another cluster partition too",
    "generator.eval_sampling_params.max_generate_length": _AS_TRAINING,
    "generator.eval_sampling_params.temperature": _AS_TRAINING,
    "generator.eval_sampling_params.top_p": _AS_TRAINING,
    "generator.eval_sampling_params.top_k": _AS_TRAINING,
    "generator.eval_sampling_params.min_p": _AS_TRAINING,
    "generator.eval_sampling_params.repetition_penalty": _AS_TRAINING,
    "generator.eval_sampling_params.logprobs": _AS_TRAINING,
    "environment.env_class": "no environment is every run's; rows or the user name it",
    "environment.skyrl_gym.text2sql.db_path": "the folder is the user's to name; SkyRL's default is a path in its container image",
    "environment.skyrl_gym.llm_as_a_judge.model": "which judge scores is the user's to name",
}
