"""What a changed setting does to a run that continues from a checkpoint: nothing, a warning, or the run is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from hpcrl.config.adapters import adapters
from hpcrl.config.difference import Difference, differences, flat
from hpcrl.config.root import Config

Kind = Literal["harmless", "warning", "refused"]


@dataclass(frozen=True)
class Effect:
    """What a change does.

    Attributes:
        kind: for a later attempt of the same run.
        reason: why, in a few words.
        from_path: for another run that starts from a checkpoint of this one.
    """

    kind: Kind
    reason: str
    from_path: Kind = "harmless"


@dataclass(frozen=True)
class Change:
    """A setting that differs, and what that means."""

    difference: Difference
    kind: Kind
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.difference} ({self.reason})"


_TABLE: tuple[tuple[Effect, str], ...] = (
    (
        Effect("refused", "the checkpoints hold the state of the other model", "refused"),
        """
        trainer.policy.model trainer.policy.model_config_kwargs trainer.critic.model trainer.critic.model_config_kwargs
        trainer.policy.megatron_config.model_config_kwargs trainer.policy.megatron_config.transformer_config_kwargs
        trainer.policy.megatron_config.lora_type trainer.algorithm.value_head_prefix
        trainer.policy.trainable_map trainer.policy.freeze_pattern trainer.policy.diffusers.enable
        trainer.policy.diffusers.is_video
        vla.enable vla.vla_type vla.use_proprio
        """,
    ),
    (
        Effect("warning", "the other backend goes on from the same state, and rounds in another way"),
        "trainer.strategy",
    ),
    (
        Effect("refused", "the model would compute something else", "warning"),
        """
        trainer.rope_scaling trainer.rope_theta generator.rope_scaling generator.rope_theta
        trainer.policy.megatron_config.moe_router_score_function trainer.policy.megatron_config.moe_router_enable_expert_bias
        """,
    ),
    (
        Effect("refused", "a checkpoint counts the prompts that are trained, and these would be others", "warning"),
        """
        data.train_data data.subset data.revision data.local_dir data.test_size data.shuffle data.shuffle_seed
        data.prompt_column data.response_column data.image_column data.image_processor_kwargs data.video_column data.video_frames data.video_pixels data.conversation_column data.text_column data.chosen_column data.rejected_column data.margin_column data.format data.weights data.drop_last
        trainer.seed trainer.train_batch_size trainer.max_prompt_length trainer.policy.diffusers.max_prompt_length
        """,
    ),
    (
        Effect("refused", "prompts would become other tokens", "warning"),
        "trainer.max_length data.train_on_what data.too_long data.lost generator.chat_template generator.chat_template_kwargs",
    ),
    (
        Effect("refused", "groups that wait to be trained have the old number of samples"),
        "generator.n_samples_per_prompt generator.step_wise_trajectories",
    ),
    (
        Effect("refused", "it decides what kind of run this is"),
        "config_class trainer.mode",
    ),
    (
        Effect("refused", "a run stays in its directory"),
        "slurm.root trainer.project_name trainer.run_name",
    ),
    (
        Effect("refused", "a run's own checkpoints come before it"),
        "trainer.resume_path",
    ),
    (
        Effect("refused", "a step that was begun would go on with weights of the other kind"),
        "generator.inference_engine.merge_lora",
    ),
    (
        Effect("refused", "groups that wait to be trained have no such tokens"),
        "trainer.distillation.top_k_from_teacher trainer.distillation.rollout_top_k_recompute",
    ),
    (
        Effect("warning", "it decides whether this attempt and later ones continue a checkpoint"),
        "trainer.resume_mode",
    ),
    (
        Effect("warning", "what is optimized changes from the next step on"),
        """
        trainer.algorithm trainer.dpo trainer.reward_model
        trainer.update_ref_every_epoch trainer.distillation trainer.max_unscored_ratio trainer.policy.diffusers vla.unnorm_key
        vla.norm_type
        generator.zero_reward_on_non_stop generator.apply_overlong_filtering
        trainer.policy.megatron_config.moe_router_load_balancing_type trainer.policy.experts
        """,
    ),
    (
        Effect("warning", "groups that wait to be trained tell of no experts, and go to those of the trainer's routers"),
        "trainer.policy.experts.router_replay",
    ),
    (
        Effect("warning", "another reference from the next step on, unless checkpoints have one that has followed the policy"),
        """
        trainer.ref.model trainer.ref.model_config_kwargs trainer.ref.megatron_config.model_config_kwargs
        trainer.ref.megatron_config.transformer_config_kwargs trainer.ref.megatron_config.moe_router_score_function
        trainer.ref.megatron_config.moe_router_enable_expert_bias
        """,
    ),
    (
        Effect("warning", "rewards change; groups that wait to be trained have the old ones"),
        "environment",
    ),
    (
        Effect("warning", "learning rates and updates change from the next step on; the count of updates goes on"),
        """
        trainer.policy.optimizer_config trainer.critic.optimizer_config trainer.update_epochs_per_batch
        trainer.policy_mini_batch_size trainer.critic_mini_batch_size trainer.policy.megatron_config.optimizer_config_kwargs
        """,
    ),
    (
        Effect("warning", "the end moves, and with it a learning rate that falls towards it"),
        "trainer.epochs trainer.max_steps",
    ),
    (
        Effect("warning", "groups that wait to be trained were sampled as before"),
        """
        generator.sampling_params generator.max_turns generator.max_input_length generator.use_conversation_multi_turn
        generator.append_eos_token_after_stop_str_in_multi_turn generator.inference_engine.model_dtype
        generator.inference_engine.quantization generator.inference_engine.engine_init_kwargs generator.inference_engine.seed
        vla.num_envs vla.continuous vla.pi05
        """,
    ),
    (
        Effect("warning", "groups that wait to be trained and are too old under it are generated again"),
        "trainer.fully_async",
    ),
    (
        Effect("warning", "scores before and after cannot be compared"),
        """
        data.val_data data.val_prompts data.val_subset data.val_revision generator.eval_n_samples_per_prompt generator.eval_sampling_params
        environment.eval_reward_function
        """,
    ),
    (
        Effect("warning", "the state is spread over other processes; random states of ranks are drawn anew"),
        """
        trainer.placement trainer.policy.sequence_parallel_size trainer.ref.sequence_parallel_size
        trainer.critic.sequence_parallel_size trainer.policy.megatron_config trainer.ref.megatron_config slurm.gpus_per_node
        """,
    ),
    (
        Effect("warning", "numbers are rounded in another way"),
        """
        trainer.policy.fsdp_config.mixed_precision trainer.ref.fsdp_config.mixed_precision
        trainer.critic.fsdp_config.mixed_precision trainer.policy.low_precision
        trainer.policy.megatron_config.dtype trainer.ref.megatron_config.dtype
        trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32
        """,
    ),
    (
        Effect("warning", "the job may find other software"),
        "slurm.setup slurm.container python_path",
    ),
    (
        Effect("harmless", "it does not change what is computed"),
        """
        trainer.policy.fsdp_config trainer.ref.fsdp_config trainer.critic.fsdp_config trainer.deterministic
        trainer.sequence_parallel_backend trainer.policy.use_torch_compile trainer.policy.compile_model
        trainer.policy.activation_offload trainer.policy.enable_liger_kernel
        trainer.gradient_checkpointing trainer.gradient_checkpointing_use_reentrant trainer.flash_attn
        trainer.gradient_checkpointing_every trainer.gradient_checkpointing_keep
        trainer.flash_attn_version trainer.micro_train_batch_size_per_gpu trainer.micro_forward_batch_size_per_gpu
        trainer.max_tokens_per_micro_batch trainer.logprobs_chunk_size trainer.use_sample_packing trainer.shared_prefixes
        trainer.policy.optimizer_config.implementation trainer.policy.optimizer_config.offload_after_step
        trainer.critic.optimizer_config.implementation trainer.critic.optimizer_config.offload_after_step
        trainer.distillation.placement trainer.distillation.backend trainer.distillation.engine trainer.distillation.fsdp_config trainer.distillation.compile_model
        trainer.distillation.micro_batch_size_per_gpu trainer.distillation.batch_size_per_replica
        trainer.distillation.max_tokens_per_micro_batch trainer.distillation.use_sample_packing trainer.distillation.precomputed_logprobs
        environment.reward_model.num_replicas environment.reward_model.ranks_per_replica environment.reward_model.fsdp_config
        environment.reward_model.batch_size_per_replica environment.reward_model.max_tokens_per_micro_batch
        trainer.policy.diffusers.offload
        trainer.policy.megatron_config.ddp_config trainer.policy.megatron_config.empty_cuda_cache
        trainer.policy.megatron_config.pipeline_dynamic_shape trainer.ref.megatron_config.pipeline_dynamic_shape
        trainer.policy.megatron_config.moe_token_dispatcher_type trainer.ref.megatron_config.moe_token_dispatcher_type
        trainer.policy.megatron_config.moe_grouped_gemm trainer.ref.megatron_config.moe_grouped_gemm
        """,
    ),
    (
        Effect("harmless", "only how fast prompts are read"),
        "data.cache data.num_workers data.prefetch_factor",
    ),
    (
        Effect("harmless", "it concerns the engines, which start anew in each attempt"),
        "generator.inference_engine",
    ),
    (
        Effect("harmless", "it concerns what is written and when"),
        """
        trainer.group_name trainer.logger trainer.profiler trainer.upload trainer.policy.record_memory
        trainer.peak_tflops
        trainer.max_ckpts_to_keep trainer.ckpt_interval trainer.ckpt_interval_epochs trainer.ckpt_mode
        trainer.ckpt_keep_every trainer.ckpt_keep_best trainer.ckpt_keep_best_mode trainer.ckpt_on_error
        trainer.hf_save_interval trainer.eval_batch_size trainer.eval_before_train trainer.eval_interval
        trainer.dump_data_batch trainer.dump_eval_results trainer.multi_modal_log_interval vla.save_video vla.trace_verbosity
        """,
    ),
    (
        Effect("harmless", "it decides only what ends a run"),
        "generator.max_logprob_mismatch generator.on_logprob_mismatch trainer.alerts",
    ),
    (
        Effect("harmless", "it concerns how environments are called, not the rewards"),
        """
        environment.timeout_seconds environment.max_failed_ratio
        environment.skyrl_gym.max_env_workers environment.skyrl_gym.search.timeout
        environment.skyrl_gym.search.log_requests environment.remote_reward.batch_size
        environment.remote_reward.service.num_services environment.remote_reward.service.max_batch_tokens
        """,
    ),
    (
        Effect("harmless", "only what is asked of the cluster"),
        """
        slurm.partition slurm.account slurm.qos slurm.constraint slurm.time_minutes slurm.cpus_per_task slurm.mem_gb
        slurm.exclusive slurm.gpu_option slurm.replicas_per_node slurm.extra slurm.network_interface slurm.array_parallelism slurm.gpu_memory_gb
        slurm.signal_seconds slurm.crash_budget slurm.replica_restarts slurm.patience
        slurm.min_replicas slurm.min_scorers slurm.replica_patience_minutes slurm.elastic slurm.elastic_scorers slurm.upload
        """,
    ),
)  # fmt: skip

EFFECTS: dict[str, Effect] = {path: effect for effect, paths in _TABLE for path in paths.split()}
"""Settings and sections; an entry of a setting comes before that of its section."""

_OF_MEGATRON = "trainer.policy.megatron_config."
_NEW_THERE = Effect("warning", "only one of the two backends reads it", "warning")
_OF_EXPERTS = Effect(
    "refused", "with target_parameters Megatron-core has an adapter for each expert, and FSDP2 one for all", "refused"
)
_SHARED = Effect("refused", "with lora_type=lora layers share adapters, which FSDP2 has one by one", "refused")
_YOURS = Effect("warning", "a setting of your own config_class, whose effect hpcrl does not know")


def effect_of(path: str) -> Effect | None:
    """Return the effect of changing a setting of hpcrl's own, or a key of one that is a table; None for any other path."""
    while path and path not in EFFECTS:
        path = path.rpartition(".")[0]
    return EFFECTS.get(path)


def _effect_between(path: str, old: Config, new: Config) -> Effect:
    """Return the effect of changing a setting together with all that differs."""
    effect = effect_of(path) or _YOURS
    one, other = sorted((old.trainer, new.trainer), key=lambda trainer: trainer.strategy)
    if one.strategy == other.strategy:
        return effect
    if path == "trainer.strategy":  # fsdp2 comes before megatron
        found = adapters(other)
        if any(lora.target_parameters for lora in found.values()):
            return _OF_EXPERTS
        return _SHARED if found and other.policy.megatron_config.lora_type == "lora" else effect
    both_read = path.startswith(f"{_OF_MEGATRON}model_config_kwargs")
    return effect if both_read or not path.startswith(_OF_MEGATRON) or effect.kind != "refused" else _NEW_THERE


def changes(old: Config, new: Config) -> list[Change]:
    """Return what differs between an attempt's configuration and that of the next one, what is refused first."""
    found = []
    for difference in differences(old, new):
        effect = _effect_between(difference.path, old, new)
        found.append(Change(difference, effect.kind, effect.reason))
    return sorted(found, key=lambda change: ("refused", "warning", "harmless").index(change.kind))


def evaluation_settings(config: Config) -> str:
    """Return the settings that decide what is said and scored in an evaluation, as a text: those that a run may be resumed with and that
    are not harmless."""
    tree = {
        "generator": asdict(config.generator),
        "environment": asdict(config.environment),
        "python_path": config.python_path,
    }
    settings = {path: value for path, value in flat(tree) if (effect_of(path) or _YOURS).kind != "harmless"}
    return json.dumps(settings, default=str)


def changes_from_path(saved: Config, new: Config) -> list[Change]:
    """Return what matters of the differences between the run that saved a checkpoint and a run that starts from it."""
    found = []
    for difference in differences(saved, new):
        effect = _effect_between(difference.path, saved, new)
        if effect.from_path != "harmless":
            found.append(Change(difference, effect.from_path, effect.reason))
    return found
