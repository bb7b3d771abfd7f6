"""What becomes of each field of Cosmos-RL."""

from __future__ import annotations

from hpcrl.config.convert.cosmos_targets_trainer import DTYPES, NEWEST, NOT_READ, RESHARD, TRAINER_TARGETS
from hpcrl.config.convert.mapping import Dropped, Target, To, Translated, alike, renamed

_UNSET = {"": None}
_VLLM = Dropped("vLLM decides it; its own options stand in generator.inference_engine.engine_init_kwargs")
_LOADER = Dropped("the controller hands prompts out one by one")
_PIPELINE_OF_VLLM = Dropped("vLLM runs its pipeline its own way")
_TEACHER_PIPELINE = Dropped("the teacher only runs forward, without a schedule")
_EVAL_REMOTE = Dropped("evaluation asks the same service as training (environment.remote_reward)")


def _dataset() -> dict[str, Target]:
    training, evaluation = "train.train_policy.dataset", "validation.dataset"
    how = "the name, with each split after a colon"
    return {
        **alike(training, "name split", Translated(("data.train_data",), how)),
        f"{training}.subset": To("data.subset", _UNSET),
        f"{training}.revision": To("data.revision", _UNSET),
        f"{training}.test_size": Translated(
            ("data.test_size",), "where evaluation has no dataset of its own; unset there: a tenth"
        ),
        f"{training}.local_dir": To("data.local_dir", _UNSET),
        **alike(evaluation, "name split", Translated(("data.val_data",), how)),
        f"{evaluation}.subset": To("data.val_subset", _UNSET),
        f"{evaluation}.revision": To("data.val_revision", _UNSET),
        f"{evaluation}.test_size": Dropped("the one of train.train_policy.dataset counts"),
        f"{evaluation}.local_dir": Dropped("data.local_dir, from train.train_policy.dataset, serves both"),
    }


def _policy_data() -> dict[str, Target]:
    policy = "train.train_policy"
    return {
        **_dataset(),
        **renamed(
            policy,
            "data",
            "dataloader_shuffle=shuffle dataloader_seed=shuffle_seed enable_dataset_cache=cache "
            "dataloader_num_workers=num_workers dataloader_prefetch_factor=prefetch_factor dataloader_drop_last=drop_last "
            "conversation_column_name=conversation_column",
        ),
        f"{policy}.prompt_column_name": To("data.prompt_column", _UNSET),
        f"{policy}.response_column_name": To("data.response_column", _UNSET),
        **alike(policy, "dataloader_batch_size dataloader_broadcast data_dispatch_as_rank_in_mesh", _LOADER),
        f"{policy}.system_prompt": NOT_READ,
        f"{policy}.enable_dp_load_balancing": Translated(
            ("trainer.max_tokens_per_micro_batch",), "micro-batches of load_balanced_max_tokens_for_batch tokens"
        ),
        f"{policy}.load_balanced_max_tokens_for_batch": To("trainer.max_tokens_per_micro_batch"),
        f"{policy}.load_balanced_batches_per_optimizer_step": Dropped("trainer.train_batch_size says it"),
        **alike(
            policy,
            "load_balanced_pool_size load_balanced_batching_strategy",
            Dropped("samples are always spread so that ranks get equally many tokens"),
        ),
    }


def _rewards() -> dict[str, Target]:
    policy, remote = "train.train_policy", "train.train_policy.remote_reward"
    return {
        f"{policy}.reward_function": To("environment.reward_function"),
        f"{policy}.use_remote_reward": To("environment.remote_reward.enable"),
        **renamed(
            remote, "environment.remote_reward", "scale reward_clip_min=clip_min reward_clip_max=clip_max batch_size"
        ),
        f"{remote}.enabled": NOT_READ,
        f"{remote}.score_key": To("environment.remote_reward.score_key"),
        f"{remote}.reward_fn": To("environment.remote_reward.reward_function"),
        f"{remote}.reward_fns": Translated(
            ("environment.remote_reward.reward_function", "environment.remote_reward.score_key"), "names and weights"
        ),
        f"{policy}.filter_reward_metric": To("trainer.algorithm.filter_reward_metric"),
        f"{policy}.bypass_reward": Translated(("environment.reward_function",), "true: none"),
        f"{policy}.group_reward_calculation": Dropped("an environment scores each sample by itself"),
        f"{policy}.overlong_reward.enable_overlong_penalty": Dropped(
            "the source does not read it: the penalty counts where reward_function lists overlong"
        ),
        **renamed(f"{policy}.overlong_reward", "environment.overlong_reward", "buffer_length penalty_factor"),
    }


def _rollout() -> dict[str, Target]:
    engine, sampling, turns = "generator.inference_engine", "generator.sampling_params", "rollout.multi_turn_config"
    parallelism = "rollout.parallelism"
    return {
        **renamed(parallelism, engine, "n_init_replicas=num_engines tp_size=tensor_parallel_size"),
        **renamed(parallelism, engine, "pp_size=pipeline_parallel_size ep_size=expert_parallel_size"),
        f"{parallelism}.dp_shard_size": Translated(
            (f"{engine}.data_parallel_size",), "copies of the weights in a replica"
        ),
        **alike(
            parallelism,
            "cp_size dp_replicate_size pp_dynamic_shape pp_micro_batch_size pp_schedule pp_layers_per_stage",
            _PIPELINE_OF_VLLM,
        ),
        **renamed("rollout", engine, "enforce_eager gpu_memory_utilization enable_chunked_prefill seed"),
        "rollout.quantization": To(f"{engine}.quantization", {"none": None}),
        "rollout.vllm_use_flashinfer": To(f"{engine}.use_flashinfer"),
        "rollout.backend": Translated((f"{engine}.backend",), "vllm is the only engine here"),
        **renamed("rollout", sampling, "max_response_length=max_generate_length include_stop_str_in_output"),
        **renamed("rollout.sampling_config", sampling, "temperature top_p repetition_penalty"),
        "rollout.sampling_config.top_k": To(f"{sampling}.top_k", {0: -1}),
        "rollout.sampling_config.use_flashinfer": Dropped(
            "vLLM turns that sampler off where it returns the log-probabilities and takes the seeds that training needs"
        ),
        "rollout.n_generation": To("generator.n_samples_per_prompt"),
        **alike("rollout", "n_generation_to_batch n_generation_mini_batch batch_size mode", _VLLM),
        "rollout.async_config.max_concurrent_requests": _VLLM,
        **alike("rollout", "async_r2r_sync broadcast_all_params", NEWEST),
        **alike("rollout", "prefetch_rollout prefetch_queue_maxsize", _LOADER),
        **alike(turns, "enable max_assistant_turns", Translated(("generator.max_turns",), "1 where enable is false")),
        f"{turns}.enable_tools": NOT_READ,
        f"{turns}.enable_thinking": Translated(("generator.chat_template_kwargs",), "the argument enable_thinking"),
        f"{turns}.custom_chat_template_path": Translated(
            ("generator.chat_template.source", "generator.chat_template.name_or_path"), "a file"
        ),
        **alike(
            turns,
            "add_generation_prompt continue_final_message",
            Dropped("each turn is a new message of the assistant"),
        ),
    }


def _evaluation() -> dict[str, Target]:
    sampling = "generator.eval_sampling_params"
    return {
        **alike("validation", "enable freq", Translated(("trainer.eval_interval",), "-1 where enable is false")),
        **renamed("validation", "trainer", "val_before_train=eval_before_train batch_size=eval_batch_size"),
        **renamed(
            "validation", sampling, "temperature top_p repetition_penalty max_response_length=max_generate_length"
        ),
        "validation.top_k": To(f"{sampling}.top_k", {0: -1}),
        "validation.n_generation": To("generator.eval_n_samples_per_prompt"),
        "validation.reward_function": To("environment.eval_reward_function"),
        "validation.use_remote_reward": _EVAL_REMOTE,
        **alike(
            "validation.remote_reward", "scale reward_fns reward_clip_min reward_clip_max batch_size", _EVAL_REMOTE
        ),
    }


def _distillation() -> dict[str, Target]:
    source, target = "distillation", "trainer.distillation"
    parallelism, placement, fsdp = f"{source}.parallelism", f"{target}.placement", f"{target}.fsdp_config"
    return {
        **renamed(
            source,
            target,
            "enable model_name_or_path=model_path model_revision compile=compile_model batch_size_per_replica "
            "max_token_len_per_mini_batch=max_tokens_per_micro_batch sequence_packing=use_sample_packing "
            "mini_batch=micro_batch_size_per_gpu seed kl_penalty_coef kl_discount_factor include_prompt top_k jsd_beta "
            "trainer_token_ids_from_teacher=top_k_from_teacher rollout_top_k_recompute",
        ),
        **renamed(
            parallelism,
            placement,
            "n_init_replicas=num_replicas tp_size=tensor_parallel_size cp_size=sequence_parallel_size "
            "ep_size=expert_parallel_size pp_size=pipeline_parallel_size",
        ),
        f"{parallelism}.dp_shard_size": Translated((f"{placement}.fsdp_size",), "the ranks that share one copy"),
        f"{parallelism}.dp_replicate_size": Dropped("trainer.distillation.placement.num_replicas says it"),
        **alike(parallelism, "pp_dynamic_shape pp_micro_batch_size pp_schedule pp_layers_per_stage", _TEACHER_PIPELINE),
        f"{source}.master_dtype": To(f"{fsdp}.mixed_precision.master_dtype", DTYPES),
        f"{source}.param_dtype": To(f"{fsdp}.mixed_precision.param_dtype", DTYPES),
        f"{source}.fsdp_reduce_dtype": To(f"{fsdp}.mixed_precision.reduce_dtype", DTYPES),
        f"{source}.logprob_dtype": Dropped("the policy's, trainer.algorithm.logprob_dtype, holds for the teacher too"),
        f"{source}.fsdp_offload": To(f"{fsdp}.cpu_offload"),
        f"{source}.fsdp_reshard_after_forward": To(f"{fsdp}.reshard_after_forward", RESHARD),
        **renamed(
            "vla",
            "vla",
            "vla_type num_envs use_proprio proprio_dim num_images_in_input training_chunk_size save_video continuous "
            "trace_verbosity unnorm_key max_steps",
        ),
        "vla.use_subprocess": Dropped("a simulator always runs in a process of its own"),
    }


TARGETS: dict[str, Target] = {
    **TRAINER_TARGETS,
    **_policy_data(),
    **_rewards(),
    **_rollout(),
    **_evaluation(),
    **_distillation(),
}
"""Dotted path of each field, of both variants of train_policy, to what becomes of it."""
