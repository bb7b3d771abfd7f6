"""What becomes of the fields of Cosmos-RL that are about training: its tables train and policy, without data and rewards."""

from __future__ import annotations

from hpcrl.config.convert.mapping import Dropped, Target, To, Translated, alike, renamed

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
RESHARD = {"always": True, "default": True, "never": False}
NOT_READ = Dropped("the source does not read it either")

_GPUS = ("trainer.placement.policy_num_nodes", "trainer.placement.policy_num_gpus_per_node", "slurm.gpus_per_node")
_MEGATRON = "trainer.policy.megatron_config"
_NO_REDIS = Dropped("there is no Redis here")
_TOKENS = Dropped("samples are always token ids with their log-probabilities here")
NEWEST = Dropped("a replica always loads the newest weights that there are")
_AT_EXIT = Dropped("a checkpoint is always written before Slurm ends an attempt")
_LIGER = Dropped("logits never exist as a whole here (trainer.logprobs_chunk_size)")


def _batches() -> dict[str, Target]:
    policy, stale = "train.train_policy", "trainer.fully_async.max_staleness_steps"
    return {
        f"{policy}.type": To("trainer.mode", {"grpo": "rl"}),
        f"{policy}.trainer_type": Translated(("vla.enable",), "the trainers of robots enable it"),
        f"{policy}.mu_iterations": To("trainer.update_epochs_per_batch"),
        f"{policy}.mini_batch": Translated(
            ("trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"), "samples per pass"
        ),
        f"{policy}.batch_size_per_optimize": Translated(
            ("trainer.policy_mini_batch_size",), "samples of one rank to prompts of all"
        ),
        f"{policy}.max_token_len_per_mini_batch": To("trainer.max_tokens_per_micro_batch"),
        **alike(policy, "allowed_outdated_steps on_policy", Translated((stale,), "on_policy: 0")),
        f"{policy}.outdated_rollout_fetch_batch_size": Dropped(
            "no prompt is handed out whose samples would be too old"
        ),
        f"{policy}.max_inflight_steps": Dropped(
            "never below allowed_outdated_steps + 1 batches, the bound that holds here"
        ),
        f"{policy}.uncentralized_training": Dropped("samples always take the way over the controller"),
        **alike(policy, "rollout_as_token_ids collect_rollout_logprobs", _TOKENS),
        "train.train_batch_per_replica": Translated(
            ("trainer.train_batch_size",),
            "samples of all replicas to prompts: divided by rollout.n_generation; with type = sft, of all their ranks",
        ),
        "train.sync_weight_interval": Translated(
            ("trainer.fully_async.sync_weight_interval",), "1 where trainer and engines take turns"
        ),
        "train.coalesce_weight_sync": NEWEST,
    }


def _loss() -> dict[str, Target]:
    policy, algorithm = "train.train_policy", "trainer.algorithm"
    correction = f"{algorithm}.off_policy_correction"
    kind = (f"{algorithm}.policy_loss_type",)
    return {
        f"{policy}.variant": Translated(
            (*kind, f"{algorithm}.dynamic_sampling.type"),
            "grpo and dapo: dual_clip, gspo: gspo; dapo filters groups too",
        ),
        f"{policy}.aipo_rho": Translated((*kind, f"{algorithm}.aipo_rho"), "set: the loss aipo with this bound"),
        f"{policy}.temperature": Translated((f"{algorithm}.temperature",), "0 divides by nothing, as 1 does"),
        f"{policy}.epsilon_low": Translated(
            (f"{algorithm}.eps_clip_low",), "negative: 1, a bound that no ratio reaches"
        ),
        f"{policy}.epsilon_high": Translated(
            (f"{algorithm}.eps_clip_high",), "negative: a bound that no ratio reaches"
        ),
        **renamed(
            policy,
            algorithm,
            "advantage_low=advantage_clip_low advantage_high=advantage_clip_high positive_nll_coef "
            "lower_bound_ratio=clip_ratio_c unbiased_loss_max_tokens unbiased_kl_estimate=kl_importance_weighted "
            "algo=advantage_estimator reference_reset_interval reset_optimizer_with_reference use_rollout_logprobs_for_loss "
            "off_policy_masking_delta=off_policy_correction.negative_sample_mask_delta "
            "behav_imp_weight_cap=off_policy_correction.token_tis_ratio_drop_high "
            "max_retry_for_on_policy=dynamic_sampling.max_sample_batches",
        ),
        **alike(
            policy,
            "loss_type balance_dp_token",
            Translated(
                (f"{algorithm}.loss_reduction",), "token-mean without balance_dp_token is a mean per micro-batch"
            ),
        ),
        f"{policy}.unbiased_advantage": To(f"{algorithm}.grpo_norm_by_std", {True: False, False: True}),
        f"{policy}.kl_beta": Translated(
            (f"{algorithm}.use_kl_loss", f"{algorithm}.kl_loss_coef"), "the weight; 0: no reference model"
        ),
        f"{policy}.entropy_coeff": Translated(
            (f"{algorithm}.use_entropy_loss", f"{algorithm}.entropy_loss_coef"),
            "here the entropy has a gradient, at the source it has none",
        ),
        f"{policy}.use_decoupled_loss": Translated(
            (f"{correction}.tis_ratio_type", f"{correction}.token_tis_ratio_clip_high"),
            "weights per token, with a cap that none reaches",
        ),
        f"{policy}.min_filter_prefix_tokens": To(f"{algorithm}.min_filter_prefix_tokens", {0: None, -1: None}),
    }


def _optimizer() -> dict[str, Target]:
    optimizer = "trainer.policy.optimizer_config"
    return {
        **renamed(
            "train",
            optimizer,
            "optm_name=name optm_weight_decay=weight_decay optm_betas=adam_betas epsilon=eps "
            "optm_warmup_start_factor=warmup_start_factor optm_decay_ratio=decay_ratio optm_min_lr_factor=min_lr_factor "
            "optm_grad_norm_clip=max_grad_norm",
        ),
        "train.optm_lr": Translated((f"{optimizer}.lr",), "one rate for all parameters"),
        "train.optm_impl": Translated((f"{optimizer}.implementation",), "one for all parameters"),
        "train.optm_warmup_steps": Translated(
            (f"{optimizer}.num_warmup_steps", f"{optimizer}.warmup_ratio"),
            "a whole number: steps times optimizer steps per step; a share stays one",
        ),
        "train.optm_decay_type": Translated((f"{optimizer}.scheduler",), "none: constant_with_warmup"),
        **renamed("train", "trainer.policy.diffusers.ema", "ema_enable=enable ema_decay=decay"),
        "train.ema_update_step_interval": To("trainer.policy.diffusers.ema.update_step_interval", {0: 1}),
    }


def _training() -> dict[str, Target]:
    fsdp = "trainer.policy.fsdp_config"
    return {
        "train.master_dtype": To(f"{fsdp}.mixed_precision.master_dtype", DTYPES),
        "train.param_dtype": To(f"{fsdp}.mixed_precision.param_dtype", DTYPES),
        "train.fsdp_reduce_dtype": To(f"{fsdp}.mixed_precision.reduce_dtype", DTYPES),
        "train.transfer_dtype": Dropped(
            "weights travel in the type of the engine, generator.inference_engine.model_dtype"
        ),
        "train.logprob_dtype": To("trainer.algorithm.logprob_dtype", DTYPES),
        "train.fsdp_offload": To(f"{fsdp}.cpu_offload"),
        "train.fsdp_reshard_after_forward": To(f"{fsdp}.reshard_after_forward", RESHARD),
        **renamed(
            "train.fp8", "trainer.policy.low_precision", "enable_fp8=fp8 fp8_recipe quant_recipe=fp8_granularity"
        ),
        **renamed(
            "train.fp4", "trainer.policy.low_precision", "enable_fp4=fp4 fp4_recipe quant_recipe=fp4_granularity"
        ),
        **renamed(
            "train",
            "trainer.policy",
            "compile=compile_model async_tp_enabled=async_tensor_parallel activation_offload",
        ),
        **renamed(
            "train", "trainer", "epoch=epochs max_num_steps=max_steps deterministic fa_version=flash_attn_version seed"
        ),
        "train.sequence_packing": Translated(
            ("trainer.use_sample_packing",), "true with Megatron's context parallelism too, which needs it"
        ),
        "train.local_dataset": Dropped("the controller reads the prompts; only their messages travel"),
        "train.force_use_hf": Dropped("models are always those of transformers, or of Megatron-core"),
        "train.non_text": Dropped("follows from vla.enable and trainer.policy.diffusers.enable"),
        **alike("train", "save_ckpt_at_exit signal_to_handle", _AT_EXIT),
        "mode": Translated(("trainer.placement.colocate_all",), "colocated and colocated_separated: true"),
        "custom": To("environment.custom"),
        "redis": _NO_REDIS,
        "eth_ips": _NO_REDIS,
    }


def _checkpoints() -> dict[str, Target]:
    ckpt, upload = "train.ckpt", "trainer.upload"
    interval, epochs, exports = "trainer.ckpt_interval", "trainer.ckpt_interval_epochs", "trainer.hf_save_interval"
    return {
        f"{ckpt}.enable_checkpoint": Translated((interval, epochs, exports), "false: -1, none"),
        f"{ckpt}.save_freq": Translated((interval,), "steps"),
        f"{ckpt}.save_freq_in_epoch": Translated((epochs,), "0: save_freq counts"),
        f"{ckpt}.save_mode": To("trainer.ckpt_mode"),
        f"{ckpt}.max_keep": To("trainer.max_ckpts_to_keep", {0: 1}),
        f"{ckpt}.export_safetensors": Translated((exports,), "with each checkpoint"),
        f"{ckpt}.upload_hf": To(f"{upload}.hf"),
        f"{ckpt}.hf_repo_name": To(f"{upload}.hf_repo_name"),
        f"{ckpt}.upload_s3": To(f"{upload}.s3", {False: None}),
        **renamed(ckpt, upload, "s3_bucket s3_prefix"),
        "train.resume": Translated(
            ("trainer.resume_mode",), "an attempt always continues its own run; another run begins anew"
        ),
        **alike(
            "train", "output_dir timestamp", Translated(("trainer.run_name",), "a run is a directory below slurm.root")
        ),
        "logging.experiment_name": Translated(("trainer.run_name",), "as a name of a directory"),
        "logging.project_name": Translated(("trainer.project_name",), "as a name of a directory"),
        "logging.group_name": To("trainer.group_name"),
        "logging.logger": Translated(
            ("trainer.logger",), "one of them; metrics/ of the run directory gets all in any case"
        ),
        "logging.log_interval": Dropped("every step is logged"),
        "logging.multi_modal_log_interval": Dropped("texts of samples are kept for every step"),
        "logging.report_mfu": Dropped("speed is among the metrics of every step"),
        **renamed("profiler", "trainer.profiler", "enable_profiler=enable enable_nsys"),
        **renamed(
            "profiler.sub_profiler_config",
            "trainer.profiler",
            "active_steps warmup_steps wait_steps record_shape profile_memory with_stack with_modules",
        ),
        "profiler.sub_profiler_config.rank_filter": Translated(("trainer.profiler.ranks",), "none: rank 0"),
        "profiler.sub_profiler_config.do_profile": Dropped("no setting of a user at the source"),
    }


def _policy() -> dict[str, Target]:
    parallelism, lora, policy = "policy.parallelism", "policy.lora", "trainer.policy"
    lengths = ("trainer.max_prompt_length", "trainer.max_length", "generator.inference_engine.max_num_batched_tokens")
    sizes = {"tp_size": "tensor_model", "pp_size": "pipeline_model", "ep_size": "expert_model"}
    sequence = (
        f"{policy}.sequence_parallel_size",
        "trainer.ref.sequence_parallel_size",
        f"{_MEGATRON}.context_parallel_size",
    )
    gpus = Translated((*_GPUS, f"{policy}.fsdp_config.fsdp_size"), "GPUs: the product of all sizes")
    return {
        **{
            f"{parallelism}.{name}": Translated(
                (f"{_MEGATRON}.{target}_parallel_size", "trainer.strategy"), "more than 1: Megatron"
            )
            for name, target in sizes.items()
        },
        f"{parallelism}.cp_size": Translated(sequence, "of the strategy's kind"),
        **alike(parallelism, "dp_shard_size dp_replicate_size n_init_replicas", gpus),
        f"{parallelism}.pp_schedule": To(f"{_MEGATRON}.pipeline_schedule"),
        f"{parallelism}.pp_layers_per_stage": To(f"{_MEGATRON}.pipeline_layers_per_stage"),
        f"{parallelism}.pp_dynamic_shape": To(f"{_MEGATRON}.pipeline_dynamic_shape"),
        f"{parallelism}.pp_micro_batch_size": Translated(
            ("trainer.micro_train_batch_size_per_gpu",), "with a pipeline"
        ),
        "policy.is_diffusers": To(f"{policy}.diffusers.enable"),
        **renamed("policy", f"{policy}.model", "model_name_or_path=path model_revision=revision"),
        "policy.model_safetensor_path": Dropped("weights lie beside config.json: name that directory as the model"),
        "policy.model_max_length": Translated(lengths, "what is left of it for the prompt; with type = sft the whole"),
        "policy.model_gradient_checkpointing": To("trainer.gradient_checkpointing"),
        **renamed("policy", policy, "trainable_map enable_liger_kernel freeze_pattern"),
        "policy.trainable_pattern": Translated(
            (f"{policy}.freeze_pattern",), "freezes the names that match none of them"
        ),
        **alike("policy", "enable_liger_cross_entropy enable_liger_fused_cross_entropy", _LIGER),
        "policy.aux_loss_coeff": Translated(
            (f"{_MEGATRON}.moe_router_load_balancing_type", f"{_MEGATRON}.transformer_config_kwargs"),
            "moe_aux_loss_coeff",
        ),
        **renamed(
            lora,
            f"{policy}.model.lora",
            "r=rank lora_names=adapter_names lora_alpha=alpha lora_dropout=dropout target_modules use_rslora modules_to_save "
            "alpha_pattern r_pattern=rank_pattern",
        ),
        f"{lora}.init_lora_weights": To(f"{policy}.model.lora.init_method", {True: "kaiming"}),
        f"{lora}.lora_path": NOT_READ,
        f"{lora}.primary_adapter": Dropped("rollouts use the first of adapter_names"),
    }


def _diffusers() -> dict[str, Target]:
    source, target = "policy.diffusers", "trainer.policy.diffusers"
    lora = (
        "r lora_names lora_path lora_alpha lora_dropout target_modules use_rslora modules_to_save alpha_pattern r_pattern "
        "init_lora_weights primary_adapter"
    )
    return {
        **renamed(
            source,
            target,
            "dtype is_video max_prompt_length weighting_scheme offload logit_mean logit_std inference_size inference_frames "
            "train_frames timesteps_fraction nft_beta weight_copy_decay_type sample.num_steps sample.eval_num_steps "
            "sample.guidance_scale sample.noise_level sample.deterministic_sampling sample.solver tokenizer.chunk_duration "
            "tokenizer.load_mean_std tokenizer.compile_encode tokenizer.temporal_window",
        ),
        **alike(source, "train_flow_shift sample.global_std", NOT_READ),
        **alike(f"{source}.lora", lora, Dropped("the source does not read it; policy.lora counts")),
    }


TRAINER_TARGETS: dict[str, Target] = {
    **_batches(),
    **_loss(),
    **_optimizer(),
    **_training(),
    **_checkpoints(),
    **_policy(),
    **_diffusers(),
}
