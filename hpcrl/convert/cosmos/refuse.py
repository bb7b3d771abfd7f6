"""What Cosmos-RL refuses in a file whose types are right. Each rule is one small function; all are reported at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcrl.config.errors import Problem

Values = Mapping[str, Any]
Rule = Callable[[Values], Iterator[Problem]]

_POLICY = "train.train_policy"
_VARIANTS = ("grpo", "gspo", "dapo")
_ENGINES = ("vllm", "vllm_async", "trtllm")
_OF_ENGINES = ("n_init_replicas", "tp_size", "pp_size", "dp_shard_size")
_PARALLELISM = {
    "cp_size": 1,
    "ep_size": 1,
    "pp_dynamic_shape": False,
    "pp_micro_batch_size": 1,
    "dp_replicate_size": 1,
    "pp_schedule": "Interleaved1F1B",
    "pp_layers_per_stage": 2,
}


def refused(values: Values) -> list[Problem]:
    """Return everything that Cosmos-RL refuses.

    Args:
        values: dotted paths of all fields to values of the right types, lists and tables brought into one form.
    """
    rules = (*_RULES, *(_GRPO_RULES if values[f"{_POLICY}.type"] == "grpo" else _SFT_RULES))
    return [problem for rule in rules for problem in rule(values)]


def _checkpoints(values: Values) -> Iterator[Problem]:
    ckpt = "train.ckpt"
    if values[f"{ckpt}.save_freq"] <= 0 and values[f"{ckpt}.save_freq_in_epoch"] <= 0:
        yield Problem(
            f"{ckpt}.save_freq",
            f"expected more than 0 where save_freq_in_epoch is 0, found {values[f'{ckpt}.save_freq']}",
        )
    if values[f"{ckpt}.save_mode"] not in ("async", "sync"):
        yield Problem(f"{ckpt}.save_mode", f'expected "async" or "sync", found "{values[f"{ckpt}.save_mode"]}"')
    upload = values[f"{ckpt}.upload_s3"]
    if upload and upload not in ("final", "all"):
        found = f'"{upload}"' if isinstance(upload, str) else "true"
        yield Problem(f"{ckpt}.upload_s3", f'expected false, "final" or "all", found {found}')
    if upload and values[f"{ckpt}.s3_bucket"] is None:
        yield Problem(f"{ckpt}.s3_bucket", "required with upload_s3")


def _training(values: Values) -> Iterator[Problem]:
    if values["train.async_tp_enabled"] and not values["train.compile"]:
        yield Problem("train.async_tp_enabled", "needs train.compile = true")
    steps = values["train.max_num_steps"]
    if steps is not None and steps <= 0:
        yield Problem("train.max_num_steps", f"expected more than 0, found {steps}; leave it out for no bound")
    if not 0 <= values["train.optm_warmup_steps"] < math.inf:
        yield Problem(
            "train.optm_warmup_steps", f"expected at least 0 steps, found {values['train.optm_warmup_steps']}"
        )
    rates = values["train.optm_lr"]
    if isinstance(rates, dict) and "global" not in rates:
        yield Problem("train.optm_lr", "expected a rate for the key global too, for parameters that no other key names")
    if not values["train.optm_lr"] and isinstance(rates, list):
        yield Problem("train.optm_lr", "expected at least one number, found an empty list")
    if len(values["train.optm_betas"]) != 2:
        yield Problem("train.optm_betas", f"expected two numbers, found {len(values['train.optm_betas'])}")


def _models(values: Values) -> Iterator[Problem]:
    for section in ("policy", "distillation"):
        if not values[f"{section}.model_name_or_path"]:
            yield Problem(f"{section}.model_name_or_path", "expected a model, found empty text")
        parallelism = f"{section}.parallelism"
        for name in ("n_init_replicas", "dp_replicate_size", "tp_size", "cp_size", "ep_size", "pp_size"):
            if values[f"{parallelism}.{name}"] < 1:
                yield Problem(f"{parallelism}.{name}", f"expected at least 1, found {values[f'{parallelism}.{name}']}")
        shard = values[f"{parallelism}.dp_shard_size"]
        if shard < -1 or shard == 0:
            yield Problem(
                f"{parallelism}.dp_shard_size", f"expected at least 1, or -1 for what the GPUs allow, found {shard}"
            )
    for lora in ("policy.lora", "policy.diffusers.lora"):
        modules = values.get(f"{lora}.target_modules")
        if isinstance(modules, str) and modules != "all-linear":
            yield Problem(f"{lora}.target_modules", f'expected a list of names or "all-linear", found "{modules}"')
    if values["policy.trainable_pattern"] is not None and values["policy.freeze_pattern"] is not None:
        yield Problem("policy.trainable_pattern", "given beside policy.freeze_pattern; leave one of them out")


def _rollout_parallelism(values: Values) -> Iterator[Problem]:
    backend = values["rollout.backend"]
    for name, only in _PARALLELISM.items() if backend in _ENGINES else ():
        found = values[f"rollout.parallelism.{name}"]
        if found != only:
            yield Problem(
                f"rollout.parallelism.{name}",
                f"the backend {backend} takes only {', '.join(_OF_ENGINES)}; expected {only}, found {found}",
            )


def _rollout(values: Values) -> Iterator[Problem]:
    turns = "rollout.multi_turn_config"
    if (
        values[f"{turns}.enable_tools"]
        and values[f"{turns}.add_generation_prompt"]
        and values[f"{turns}.continue_final_message"]
    ):
        yield Problem(f"{turns}.continue_final_message", "expected false with enable_tools and add_generation_prompt")
    if values["rollout.prefetch_queue_maxsize"] < 1:
        yield Problem(
            "rollout.prefetch_queue_maxsize", f"expected at least 1, found {values['rollout.prefetch_queue_maxsize']}"
        )


def _pipeline(values: Values) -> Iterator[Problem]:
    if values["policy.parallelism.pp_size"] <= 1:
        return
    batch = values["train.train_batch_per_replica"]
    for path in ("policy.parallelism.pp_micro_batch_size", f"{_POLICY}.mini_batch"):
        micro = values[path]
        if micro < 1 or batch % micro:
            yield Problem(
                path, f"expected a divisor of train.train_batch_per_replica ({batch}) with a pipeline, found {micro}"
            )
    if values["train.fsdp_offload"]:
        yield Problem(
            "train.fsdp_offload", "does not work with a pipeline (policy.parallelism.pp_size); set it to false"
        )


def _grpo(values: Values) -> Iterator[Problem]:
    variant = values[f"{_POLICY}.variant"]
    if variant not in _VARIANTS:
        yield Problem(f"{_POLICY}.variant", f'expected one of {", ".join(_VARIANTS)}, found "{variant}"')
    if not values[f"{_POLICY}.reward_function"]:
        yield Problem(f"{_POLICY}.reward_function", "expected at least one reward function, found none")
    if values[f"{_POLICY}.use_decoupled_loss"] and values[f"{_POLICY}.use_rollout_logprobs_for_loss"]:
        yield Problem(
            f"{_POLICY}.use_decoupled_loss", "given beside use_rollout_logprobs_for_loss; leave one of them out"
        )
    if values[f"{_POLICY}.on_policy"] and values["train.sync_weight_interval"] != 1:
        yield Problem(
            "train.sync_weight_interval",
            f"expected 1 with {_POLICY}.on_policy, found {values['train.sync_weight_interval']}",
        )
    if values[f"{_POLICY}.uncentralized_training"] and variant != "grpo":
        yield Problem(f"{_POLICY}.uncentralized_training", f'works only with variant = "grpo", found "{variant}"')
    evaluated = values["validation.use_remote_reward"]
    if evaluated is not None and evaluated != values[f"{_POLICY}.use_remote_reward"]:
        yield Problem("validation.use_remote_reward", f"expected the same as {_POLICY}.use_remote_reward")


def _lora_of_grpo(values: Values) -> Iterator[Problem]:
    if "policy.lora.r" not in values:
        return
    if values["train.compile"]:
        yield Problem("train.compile", 'does not work with LoRA and type = "grpo"; set it to false')
    if values["policy.parallelism.tp_size"] != 1:
        yield Problem(
            "policy.parallelism.tp_size",
            f'expected 1 with LoRA and type = "grpo", found {values["policy.parallelism.tp_size"]}',
        )


def _sizes_of_grpo(values: Values) -> Iterator[Problem]:
    for path in ("rollout.n_generation", "train.train_batch_per_replica"):
        if values[path] < 1:
            yield Problem(path, f"expected at least 1, found {values[path]}")
    if values["policy.parallelism.dp_replicate_size"] != 1:
        yield Problem(
            "policy.parallelism.dp_replicate_size",
            f'expected 1 with type = "grpo", found {values["policy.parallelism.dp_replicate_size"]}; use n_init_replicas',
        )


def _load_balancing(values: Values) -> Iterator[Problem]:
    if not values[f"{_POLICY}.enable_dp_load_balancing"]:
        return
    if values["train.max_num_steps"] is None:
        yield Problem("train.max_num_steps", f"required with {_POLICY}.enable_dp_load_balancing")
    strategy = values[f"{_POLICY}.load_balanced_batching_strategy"]
    if strategy not in ("prefer_first", "prefer_closest"):
        yield Problem(
            f"{_POLICY}.load_balanced_batching_strategy", f'expected prefer_first or prefer_closest, found "{strategy}"'
        )
    if values[f"{_POLICY}.load_balanced_batches_per_optimizer_step"] <= 0:
        yield Problem(f"{_POLICY}.load_balanced_batches_per_optimizer_step", "expected at least 1")


_RULES: tuple[Rule, ...] = (_checkpoints, _training, _models, _rollout_parallelism, _rollout, _pipeline)
_GRPO_RULES: tuple[Rule, ...] = (_grpo, _lora_of_grpo, _sizes_of_grpo)
_SFT_RULES: tuple[Rule, ...] = (_load_balancing,)
