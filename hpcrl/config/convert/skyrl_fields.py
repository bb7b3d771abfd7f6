"""SkyRL's settings: their names in its old and its present layout, their defaults, and what becomes of each here.

`skyrl_fields.tsv` lists the present layout: dotted path and default, as JSON. Most settings have the same path here; this module
holds the others.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from hpcrl.config.convert.mapping import Dropped, Target, To, Translated


def _read_defaults() -> dict[str, Any]:
    with Path(__file__).with_name("skyrl_fields.tsv").open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {row["path"]: json.loads(row["default"]) for row in rows}


# Dotted path in the present layout -> default.
SKYRL_DEFAULTS: dict[str, Any] = _read_defaults()

_ENGINE = "generator.inference_engine."
_ENGINE_OLD = {
    "num_inference_engines": "num_engines",
    "inference_engine_tensor_parallel_size": "tensor_parallel_size",
    "inference_engine_pipeline_parallel_size": "pipeline_parallel_size",
    "inference_engine_expert_parallel_size": "expert_parallel_size",
    "inference_engine_data_parallel_size": "data_parallel_size",
    "remote_inference_engine_urls": "remote_urls",
}
_ENGINE_SAME = {path.removeprefix(_ENGINE) for path in SKYRL_DEFAULTS if path.startswith(_ENGINE)}
_ENGINE_SAME -= {*_ENGINE_OLD.values(), "distributed_executor_backend"}

# These the present SkyRL still takes for their new names.
STILL_TAKEN = {f"generator.{old}": _ENGINE + new for old, new in _ENGINE_OLD.items()}
STILL_TAKEN |= {f"generator.{name}": _ENGINE + name for name in sorted(_ENGINE_SAME)}

# Old path -> present path, where the value stays as it is.
RENAMED: dict[str, str] = STILL_TAKEN | {
    "trainer.algorithm.ppo_loss_type": "trainer.algorithm.policy_loss_type",
    "trainer.algorithm.init_kl_coef": "trainer.algorithm.kl_loss_coef",
    "trainer.algorithm.kl_target": "trainer.algorithm.kl_ctrl.kl_target",
}

# Present path -> default where a file of the old layout leaves the setting out.
OLD_DEFAULTS: dict[str, Any] = {
    "trainer.placement.policy_num_gpus_per_node": 4,
    "trainer.placement.critic_num_gpus_per_node": 4,
    "trainer.placement.ref_num_gpus_per_node": 4,
    "trainer.ref.fsdp_config.cpu_offload": True,
    "trainer.algorithm.loss_reduction": "sequence_mean",
    "generator.inference_engine.tensor_parallel_size": 4,
    "generator.inference_engine.enforce_eager": False,
    "generator.batched": True,
    "generator.use_conversation_multi_turn": False,
    "generator.eval_sampling_params.temperature": 1.0,
}

_ONE_DIRECTORY = "a run is one directory, <slurm.root>/<trainer.project_name>/<trainer.run_name>, that holds its checkpoints, exports and logs"
_NO_REWARD_MODEL = "SkyRL has no reward model any more; environments score"
_DEEPSPEED = "DeepSpeed is no backend, of SkyRL neither; trainer.policy.fsdp_config says how a model is sharded, optimizer_config.max_grad_norm clips"
_REF_UNUSED = "SkyRL itself does not use it for the reference model"
_OWN_SERVERS = "a run starts its own engines, generator.inference_engine.num_engines replicas on its own nodes"
_NO_ENDPOINT = "the engines' addresses are private to a run; an environment calls them through hpcrl"
_HYDRA = "belongs to Hydra, the program that read SkyRL's files"

_DROPPED: dict[str, str] = {
    "trainer.ckpt_path": _ONE_DIRECTORY,
    "trainer.export_path": _ONE_DIRECTORY,
    "trainer.log_path": _ONE_DIRECTORY,
    "trainer.bf16": "the type of computation is fsdp_config.mixed_precision.param_dtype, bf16 unless it is set; the optimizer's copy is fp32",
    "trainer.policy.megatron_config.torch_profiler_config.save_path": _ONE_DIRECTORY,
    "trainer.ref.megatron_config.optimizer_config_kwargs": _REF_UNUSED,
    "trainer.ref.megatron_config.empty_cuda_cache": _REF_UNUSED,
    "trainer.ref.megatron_config.dist_ckpt_optim_fully_reshardable": _REF_UNUSED,
    "generator.batched": "every sample is a request of its own, which gives a single turn the same result",
    "generator.model_name": "it is trainer.policy.model.path",
    _ENGINE + "run_engines_locally": _OWN_SERVERS,
    _ENGINE + "remote_urls": _OWN_SERVERS,
    _ENGINE + "external_proxy_url": _OWN_SERVERS,
    _ENGINE + "external_server_urls": _OWN_SERVERS,
    _ENGINE + "override_existing_update_group": "weights are files; there is no group of processes to replace",
    _ENGINE + "enable_http_endpoint": _NO_ENDPOINT,
    _ENGINE + "http_endpoint_host": _NO_ENDPOINT,
    _ENGINE + "http_endpoint_port": _NO_ENDPOINT,
    _ENGINE + "served_model_name": _NO_ENDPOINT,
    _ENGINE + "async_engine": "engines always serve requests as they come",
    _ENGINE
    + "vllm_v1_disable_multiproc": "each engine is a server process; each group has a seed of its own, made from trainer.seed",
    _ENGINE + "enable_ray_prometheus_stats": "there is no Ray; engine figures are among the metrics of the run",
    _ENGINE + "distributed_executor_backend": "there is no Ray; vLLM starts the processes of a replica itself",
    "trainer.placement.colocate_critic_reward": _NO_REWARD_MODEL,
    "trainer.placement.reward_num_nodes": _NO_REWARD_MODEL,
    "trainer.placement.reward_num_gpus_per_node": _NO_REWARD_MODEL,
    "trainer.algorithm.normalize_reward": "a running mean and deviation of the critic's values went with SkyRL's reward models",
    "deepspeed_config": _DEEPSPEED,
    "deepspeed_config.zero_optimization.stage": _DEEPSPEED,
    "deepspeed_config.zero_optimization.zero_hpz_partition_size": _DEEPSPEED,
    "deepspeed_config.gradient_clipping": _DEEPSPEED,
    "trainer.policy.deepspeed_config": _DEEPSPEED,
    "trainer.critic.deepspeed_config": _DEEPSPEED,
    "trainer.ref.deepspeed_config": _DEEPSPEED,
    "trainer.disable_fast_tokenizer": "transformers 5 has one tokenizer per model",
    "trainer.ref.fsdp_config.mixed_precision.reduce_dtype": "the reference is not trained",
    "defaults": _HYDRA,
    "hydra": _HYDRA,
}
_DROPPED_LAST: dict[str, str] = {
    "lora_sync_path": "adapters reach the engines as files of the run directory",
    "buffer_dtype": "only FSDP1 keeps buffers in a type of their own",
}
_DROPPED_BELOW: dict[str, str] = {
    "trainer.ref.model.lora.": "SkyRL itself never adapts the reference model",
    "trainer.ref.megatron_config.ddp_config.": _REF_UNUSED,
    "trainer.ref.megatron_config.torch_profiler_config.": _REF_UNUSED,
    "trainer.ref.megatron_config.lora_config.": _REF_UNUSED,
    "trainer.ref.megatron_config.optimizer_config_kwargs.": _REF_UNUSED,
}

# Settings without a place here that nevertheless change what a run does, unless they have one of these values.
HARMLESS: dict[str, tuple[Any, ...]] = {
    _ENGINE + "run_engines_locally": (True,),
    _ENGINE + "external_proxy_url": (None,),
    _ENGINE + "external_server_urls": (None, []),
    _ENGINE + "enable_http_endpoint": (False,),
}

_TIS = "trainer.algorithm.off_policy_correction."
_PLACED = "left out where it shares or equals the policy's GPUs, or there is no such model"
_ELSEWHERE: dict[str, Target] = {
    "trainer.policy.megatron_config.torch_profiler_config.enable": To("trainer.profiler.enable"),
    "trainer.policy.megatron_config.torch_profiler_config.ranks": To("trainer.profiler.ranks"),
    "trainer.policy.megatron_config.lora_config.lora_type": To("trainer.policy.megatron_config.lora_type"),
    "trainer.algorithm.value_clip": To("trainer.algorithm.value_clip", {None: 0.0}),
    "data.val_data": To("data.val_data", {None: []}),
    "trainer.algorithm.use_tis": Translated((_TIS + "tis_ratio_type",), 'true: "token"'),
    "trainer.algorithm.tis_imp_ratio_cap": Translated(
        (_TIS + "token_tis_ratio_clip_high",), "with use_tis; a cap of 0 or less, the default, would turn the loss around and is left out"
    ),
    "trainer.algorithm.use_kl_estimator_k3": Translated(("trainer.algorithm.kl_estimator_type",), "true: k3, false: k1"),
    "trainer.algorithm.use_abs_kl": Translated(("trainer.algorithm.kl_estimator_type",), "true: abs, whatever use_kl_estimator_k3 is"),
    "trainer.num_warmup_steps": Translated(
        ("trainer.policy.optimizer_config.num_warmup_steps", "trainer.critic.optimizer_config.num_warmup_steps"), "for both models"
    ),
    "trainer.target_modules": Translated(
        ("trainer.policy.model.lora.target_modules", "trainer.critic.model.lora.target_modules"), "for both models"
    ),
    "trainer.exclude_modules": Translated(
        ("trainer.policy.model.lora.exclude_modules", "trainer.critic.model.lora.exclude_modules"), "for both models"
    ),
    "trainer.placement.colocate_all": Translated(
        ("trainer.placement.colocate_all",), "true: trainer and engines get nodes of their own"
    ),
    "trainer.placement.colocate_policy_ref": Translated(
        ("trainer.placement.colocate_policy_ref",), "true too where colocate_all is"
    ),
    "trainer.placement.ref_num_nodes": Translated(("trainer.placement.ref_num_nodes",), _PLACED),
    "trainer.placement.ref_num_gpus_per_node": Translated(("trainer.placement.ref_num_gpus_per_node",), _PLACED),
    "trainer.placement.critic_num_nodes": Translated(("trainer.placement.critic_num_nodes",), _PLACED),
    "trainer.placement.critic_num_gpus_per_node": Translated(("trainer.placement.critic_num_gpus_per_node",), _PLACED),
    "trainer.strategy": Translated(("trainer.strategy",), "deepspeed: fsdp2"),
    "trainer.resume_mode": Translated(("trainer.resume_mode",), "null: none; from_path names a checkpoint that hpcrl cannot read"),
    "trainer.resume_path": Translated((), "a SkyRL checkpoint cannot be read here"),
    "trainer.project_name": Translated(("trainer.project_name",), "letters that a directory's name cannot have become -"),
    "trainer.run_name": Translated(("trainer.run_name",), "letters that a directory's name cannot have become -"),
    "trainer.logger": Translated(("trainer.logger",), "the first tracker of a list; console: `hpcrl submit --follow`"),
    _ENGINE + "backend": Translated((_ENGINE + "backend",), "sglang: vllm"),
    _ENGINE + "weight_sync_backend": Translated((_ENGINE + "weight_sync_backend",), "nccl and gloo: filesystem"),
    "generator.sampling_params.logprobs": To("generator.sampling_params.logprobs", {None: 1}),
    "generator.eval_sampling_params.logprobs": To("generator.eval_sampling_params.logprobs", {None: 1}),
}  # fmt: skip


def _target(path: str) -> Target:
    name = path.rpartition(".")[2]
    below = next((why for prefix, why in _DROPPED_BELOW.items() if path.startswith(prefix)), None)
    if why := _DROPPED.get(path) or _DROPPED_LAST.get(name) or below:
        return Dropped(why)
    return _ELSEWHERE.get(path, To(path))


# Every setting of SkyRL, by its name in either layout.
TARGETS: dict[str, Target] = {path: _target(path) for path in (*SKYRL_DEFAULTS, *_DROPPED, *_ELSEWHERE)}
TARGETS |= {old: _target(new) for old, new in RENAMED.items()}

# Names that only the old layout has, and those of them that the present SkyRL refuses.
ONLY_OLD = set(TARGETS) - set(SKYRL_DEFAULTS) - {"generator.model_name", "defaults", "hydra"}
REFUSED = ONLY_OLD - set(STILL_TAKEN)

# Paths above those of settings.
SECTIONS = {path[:end] for path in TARGETS for end, letter in enumerate(path) if letter == "."} - set(TARGETS)
