"""Batches, placement, engines, evaluation and checkpoints of verl's trainer."""

from __future__ import annotations

import math

from hpcrl.convert.conversion import Conversion, directory_name
from hpcrl.convert.rules import Rule, lost, put, seen
from hpcrl.convert.verl.conditions import has_critic
from hpcrl.convert.verl.source import VerlSource

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_ENGINE, _PLACEMENT = "generator.inference_engine.", "trainer.placement."
_EVAL = "generator.eval_sampling_params."
_TRACKERS = ("console", "wandb", "mlflow", "swanlab", "tensorboard", "trackio")


def _strategy(source: VerlSource, conversion: Conversion, path: str) -> None:
    found = {"fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "megatron"}.get(source[path])
    if found is None:
        lost(source, conversion, path, "trainer.strategy", f"there is no {source[path]}; expected fsdp2 or megatron")
    else:
        put(
            source,
            conversion,
            path,
            "trainer.strategy",
            found,
            "FSDP2 shards the same" if source[path] == "fsdp" else "",
        )


def _placement(source: VerlSource, conversion: Conversion, path: str) -> None:
    nodes, gpus = source.number("trainer.nnodes"), source.number(path)
    put(source, conversion, path, _PLACEMENT + "policy_num_gpus_per_node", gpus)
    width = math.prod(
        source.number(f"{_ROLLOUT}{kind}_size")
        for kind in ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")
    )
    name = source.names.get(path, path)
    engines = max(1, nodes * gpus // width)
    conversion.values["slurm.gpus_per_node"] = max(gpus, width)
    conversion.values[_ENGINE + "num_engines"] = engines
    conversion.note(
        "translated",
        name,
        _ENGINE + "num_engines",
        f"{engines} replica(s) of {width} GPU(s), on all GPUs of the trainer",
    )
    message = f"{max(gpus, width)}, the most that one node needs; name what your nodes have"
    conversion.note("translated", name, "slurm.gpus_per_node", message)
    shared = engines * width == nodes * gpus and gpus % width == 0
    conversion.values[_PLACEMENT + "colocate_all"] = shared
    reason = "as in verl trainer and engines share GPUs"
    if not shared:
        reason = "replicas do not divide the GPUs of a node; the engines have nodes of their own, so that the run needs more nodes than in verl"
    conversion.note("translated", name, _PLACEMENT + "colocate_all", reason)


def _micro_batch(source: VerlSource, conversion: Conversion, path: str) -> None:
    dynamic = bool(source[_ACTOR + "use_dynamic_bsz"])
    if path.endswith("use_dynamic_bsz") and "log_prob" not in path:
        conversion.note("mapped", source.names[path]) if path in source.names else None
    elif path.endswith("ppo_max_token_len_per_gpu"):
        if dynamic:
            put(source, conversion, path, "trainer.max_tokens_per_micro_batch", source[path])
        elif path in source.names:
            conversion.note("dropped", source.names[path], "", "had no effect without use_dynamic_bsz")
    elif path.endswith(("micro_batch_size_per_gpu", "micro_batch_size")):
        kind = "forward" if "log_prob" in path else "train"
        if dynamic and path in source.names:
            conversion.note("dropped", source.names[path], "", "had no effect with use_dynamic_bsz")
        elif not dynamic and source[path] is not None:
            ranks = (
                1
                if path.endswith("per_gpu")
                else source.number("trainer.nnodes") * source.number("trainer.n_gpus_per_node")
            )
            value = max(1, source[path] // ranks) if isinstance(source[path], int) else source[path]
            how = "" if ranks == 1 else f"{source[path]} over {ranks} GPUs"
            put(source, conversion, path, f"trainer.micro_{kind}_batch_size_per_gpu", value, how)
    elif path in source.names:
        message = "one number serves passes with and without gradient, that of the actor; changes memory or speed alone"
        conversion.note("dropped", source.names[path], "", message)


def _critic(source: VerlSource, conversion: Conversion, path: str) -> None:
    if path not in source.names and not has_critic(source):
        return
    if path == "critic.enable":
        seen(source, conversion, path)
    elif not has_critic(source):
        conversion.note(
            "dropped", source.names[path], "", "had no effect, there is a critic only with algorithm.adv_estimator=gae"
        )
    elif path.endswith("ppo_mini_batch_size"):
        value = source[path] if source[path] is not None else source[_ACTOR + "ppo_mini_batch_size"]
        put(source, conversion, path, "trainer.critic_mini_batch_size", value)
    elif source[path] in (None, source[_ACTOR + "ppo_epochs"]):
        seen(source, conversion, path)
    else:
        message = f"policy and critic pass over a batch as often, {source[_ACTOR + 'ppo_epochs']} times as actor.ppo_epochs says"
        lost(source, conversion, path, "", message)


def _critic_warmup(source: VerlSource, conversion: Conversion, path: str) -> None:
    if has_critic(source):
        steps = source[path]
        value = max(steps - 1, 0) if isinstance(steps, int) else steps
        how = "the policy is trained in that step too" if steps else ""
        put(source, conversion, path, "trainer.critic.warmup_steps", value, how)
    elif path in source.names:
        conversion.note("dropped", source.names[path], "", "had no effect, there is no critic")


def _eval_batch(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[path] is not None:
        put(source, conversion, path, "trainer.eval_batch_size", source[path])
    else:
        seen(source, conversion, path)


def _shuffle_seed(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[path] is not None:
        put(source, conversion, path, "data.shuffle_seed", source[path])
    else:
        seen(source, conversion, path)


def _long_prompts(source: VerlSource, conversion: Conversion, path: str) -> None:
    if path.endswith("filter_overlong_prompts"):
        if source[path]:
            seen(source, conversion, path, "", "prompts above trainer.max_prompt_length are always dropped here")
        else:
            message = "prompts above trainer.max_prompt_length are dropped here; verl raises an error at one, or cuts it (data.truncation)"
            conversion.note("differs", source.names.get(path, path), "", message)
    else:
        seen(source, conversion, path, "", "longer prompts are dropped here, so that none is cut")


def _engine(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[path] == "vllm":
        put(source, conversion, path, _ENGINE + "backend", "vllm")
    else:
        conversion.values[_ENGINE + "backend"] = "vllm"
        lost(source, conversion, path, _ENGINE + "backend", f"there is no {source[path]} here; vllm replaces it")


def _evaluation(source: VerlSource, conversion: Conversion, path: str) -> None:
    sampled, last = bool(source[_ROLLOUT + "val_kwargs.do_sample"]), path.rpartition(".")[2]
    if last == "do_sample":
        if not sampled:
            conversion.values[_EVAL + "temperature"] = 0.0
        seen(source, conversion, path, _EVAL + "temperature", "" if sampled else "false: 0, greedy")
    elif not sampled:
        if path in source.names:
            conversion.note("dropped", source.names[path], "", "had no effect without val_kwargs.do_sample")
    elif last == "temperature" or source[path] != source[_ROLLOUT + last]:
        put(source, conversion, path, _EVAL + last, source[path])
    else:
        seen(source, conversion, path, _EVAL + last)


def _turns(source: VerlSource, conversion: Conversion, path: str) -> None:
    on = source[_ROLLOUT + "multi_turn.enable"]
    if path.endswith("enable"):
        if on:
            message = "tools and interactions are classes of verl; write them as an environment of several turns (docs/environments)"
            lost(source, conversion, path, "", message)
            message = "max_generate_length bounds each turn here; verl's max_response_length bounds all turns together"
            conversion.note(
                "differs", source.names.get("data.max_response_length", "data.max_response_length"), "", message
            )
        else:
            seen(source, conversion, path)
    elif on and source[path] is not None:
        put(source, conversion, path, "generator.max_turns", source[path])
    elif path in source.names:
        conversion.note("dropped", source.names[path], "", "had no effect without multi_turn.enable")


def _name(source: VerlSource, conversion: Conversion, path: str) -> None:
    target = "trainer.run_name" if path.endswith("experiment_name") else "trainer.project_name"
    if path in source.names:
        given = source[path]
        valid = None if given is None else directory_name(str(given))
        conversion.values[target] = valid
        same = valid == given
        message = "" if same else f"{given!r} is no directory name; {valid or 'left out'}"
        conversion.note("mapped" if same else "translated", source.names[path], target, message)


def _logger(source: VerlSource, conversion: Conversion, path: str) -> None:
    if path not in source.names:
        conversion.note(
            "differs", path, "", 'left out: verl logs to console and wandb, hpcrl to files and "tensorboard"'
        )
        return
    given = source[path] if isinstance(source[path], list) else [source[path]]
    kept = [one for one in given if one in _TRACKERS]
    conversion.values["trainer.logger"] = kept or None
    missing = ", ".join(str(one) for one in given if one not in kept)
    conversion.note(
        "translated" if missing else "mapped",
        source.names[path],
        "trainer.logger",
        f"there is no {missing}" if missing else "",
    )


def _resume(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[path] == "resume_path":
        message = "a checkpoint of verl cannot be read; name an export of it as trainer.policy.model.path"
        lost(source, conversion, path, "", message)
    elif path in source.names:
        message = f"{source[path]}: a run here begins at step 0, and continues itself after a time limit"
        conversion.note("translated", source.names[path], "trainer.resume_mode", message)


def _save_mode(source: VerlSource, conversion: Conversion, path: str) -> None:
    put(source, conversion, path, "trainer.ckpt_mode", "async" if source[path] else "sync")


def _eval_interval(source: VerlSource, conversion: Conversion, path: str) -> None:
    put(source, conversion, path, "trainer.eval_interval", source[path])
    if source.number(path) != source[path] and source["trainer.val_before_train"]:
        message = "not above 0: no evaluation here, in verl one before training (val_before_train)"
        conversion.note("differs", source.names.get(path, path), "", message)


def _loop(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[path] == "sync":
        seen(source, conversion, path)
    else:
        message = f"{source[path]}: set trainer.fully_async.max_staleness_steps and trainer.placement; verl's measures of staleness are others"
        lost(source, conversion, path, "", message)


_MICRO = [
    _ACTOR + last
    for last in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")
]
_MICRO += [
    _ROLLOUT + f"log_prob_{last}"
    for last in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
]

TRAINING: dict[str, Rule[VerlSource]] = {
    _ACTOR + "strategy": _strategy,
    "trainer.n_gpus_per_node": _placement,
    **dict.fromkeys(_MICRO, _micro_batch),
    **{f"critic.{last}": _critic for last in ("enable", "ppo_mini_batch_size", "ppo_epochs")},
    "trainer.critic_warmup": _critic_warmup,
    "data.val_batch_size": _eval_batch,
    "data.seed": _shuffle_seed,
    "data.filter_overlong_prompts": _long_prompts,
    "data.truncation": _long_prompts,
    _ROLLOUT + "name": _engine,
    **{f"{_ROLLOUT}val_kwargs.{last}": _evaluation for last in ("do_sample", "temperature", "top_p", "top_k")},
    _ROLLOUT + "multi_turn.enable": _turns,
    _ROLLOUT + "multi_turn.max_assistant_turns": _turns,
    "trainer.project_name": _name,
    "trainer.experiment_name": _name,
    "trainer.logger": _logger,
    "trainer.resume_mode": _resume,
    _ACTOR + "checkpoint.async_save": _save_mode,
    "trainer.v1.trainer_mode": _loop,
    "trainer.test_freq": _eval_interval,
}
