"""The settings of SkyRL whose value is written differently here, or decides about several settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hpcrl.convert.conversion import Conversion, directory_name
from hpcrl.convert.skyrl import additions
from hpcrl.convert.skyrl.fields import OVERLONG
from hpcrl.convert.skyrl.source import SkyrlSource

_PLACEMENT = "trainer.placement."
_ALGORITHM = "trainer.algorithm."
_CORRECTION = _ALGORITHM + "off_policy_correction."
_ENGINE = "generator.inference_engine."
_CRITIC = "trainer.critic.model.path"
_REWARDS = {"gsm8k": "gsm8k", "aime": "direct_math"}  # environments of SkyRL -> the rewards that they are here
_ABSENT = {
    "lcb": "programs that are run against tests; an environment of your own does that (docs/environments)",
    "searchcode": "search and a Python interpreter together; search and python_tool are environments of their own here",
}
_MEGATRON_SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
_LAST_RATE = 1e-7  # at which transformers' polynomial schedule ends
_SCHEDULES = {
    "constant": ("constant_with_warmup", "constant_with_warmup without a warm-up"),
    "polynomial": ("linear", "its power is 1 in SkyRL; linear, down to a rate of 1e-7"),
    "cosine_with_restarts": ("cosine", "it has one cycle in SkyRL, which is cosine"),
}
_INCOMPLETE_SCHEDULES = {
    "cosine_with_min_lr": 'smallest rate; here scheduler = "cosine" with min_lr_factor is that',
    "cosine_warmup_with_min_lr": 'smallest rate; here scheduler = "cosine" with min_lr_factor is near',
    "warmup_stable_decay": 'steps of the decay; here scheduler = "cosine" with decay_ratio is that',
}

Translation = Callable[[SkyrlSource, Conversion, str], None]


def has_advantages(source: SkyrlSource) -> bool:
    return source[_ALGORITHM + "policy_loss_type"] != "cross_entropy"


def has_reference(source: SkyrlSource) -> bool:
    in_reward = source[_ALGORITHM + "use_kl_in_reward"] and has_advantages(source)
    return bool(source[_ALGORITHM + "use_kl_loss"] or in_reward)


def has_critic(source: SkyrlSource) -> bool:
    return source[_CRITIC] is not None


def is_fully_async(source: SkyrlSource) -> bool:
    """Whether SkyRL trains fully asynchronously: a program of its own, which refuses colocation and batches of several mini-batches.

    A YAML file does not say which program reads it. One that names these settings and fits that program is taken to be meant for it.
    """
    if source["trainer.fully_async.enabled"]:
        return True
    if source.program is not None:
        return "fully_async" in source.program.name
    named = any(path.startswith("trainer.fully_async.") for path in source.given)
    one_mini_batch = source["trainer.train_batch_size"] == source["trainer.policy_mini_batch_size"]
    return named and not source[_PLACEMENT + "colocate_all"] and one_mini_batch


def name_of_directory(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    value, name = source.given[path], source.names[path]
    valid = conversion.values[path] = None if value is None else directory_name(str(value))
    if valid == value:
        conversion.note("mapped", name, path)
    else:
        conversion.note("translated", name, path, f"{value!r} is no directory name; {valid or 'left out'}")


def logger(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    value, name = source.given[path], source.names[path]
    trackers = [tracker for tracker in (value if isinstance(value, list) else [value]) if tracker is not None]
    conversion.values[path] = trackers[0] if len(trackers) == 1 else trackers
    conversion.note("mapped", name, path)


def overlong(source: SkyrlSource, conversion: Conversion) -> None:
    """Give the penalty of SkyRL's DAPO example its place, where what scores has a name among hpcrl's rewards."""
    if not source.overlong:
        return
    length, factor = (source.overlong.get(path) for path in OVERLONG)
    env_class, target = source["environment.env_class"], "environment.overlong_reward.buffer_length"
    found = {"buffer_length": length, "penalty_factor": factor}
    if (
        isinstance(length, int)
        and isinstance(factor, int | float)
        and env_class in _REWARDS
        and source["generator.max_turns"] == 1
    ):
        conversion.values.pop("environment.env_class", None)
        reward = _REWARDS[env_class]
        conversion.values["environment.reward_function"] = {reward: 1.0, "overlong": 1.0}
        conversion.values |= {f"environment.overlong_reward.{name}": value for name, value in found.items()}
        message = f'{reward} and overlong score as environment.reward_function, in place of environment.env_class = "{env_class}"'
        conversion.note("translated", OVERLONG[0], target, message)
        conversion.note("mapped", OVERLONG[1], "environment.overlong_reward.penalty_factor")
        return
    message = (
        f"a penalty on the last {length} tokens of long responses, {factor} at most: environment.overlong_reward is that, beside a reward that "
        f"environment.reward_function names. The environment {env_class} is none of them, so that the penalty is left out (docs/rewards.md)"
    )
    first, *others = source.overlong
    conversion.note("conflict", first, "", message)
    for path in others:
        conversion.note("dropped", path, "", f"see {first}")


def renamed_environment(source: SkyrlSource, conversion: Conversion) -> None:
    """Write the environment of SkyRL that has another name here, and name those that have no counterpart."""
    name, target = "environment.env_class", "environment.env_class"
    env_class = source[name]
    if env_class == "aime" and "environment.reward_function" not in conversion.values:
        conversion.values[target] = _REWARDS[env_class]
        conversion.note("translated", name, target, "1 or -1 for what follows Answer:, by the rules of DAPO")
    elif env_class in _ABSENT:
        conversion.note("conflict", name, target, f"{env_class} has no counterpart here: {_ABSENT[env_class]}")


def env_class(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    value = source.given[path]
    if value not in _ABSENT and value != "aime":  # which `renamed_environment` writes
        conversion.values[path] = value
        conversion.note("mapped", source.names[path], path)


def schedule(source: SkyrlSource, conversion: Conversion, prefix: str) -> None:
    """Write the schedule of a model and the shape of its warm-up, which SkyRL takes from transformers without further arguments."""
    name, rate, values = source[prefix + "scheduler"], source[prefix + "lr"], conversion.values
    section = prefix if prefix.startswith("trainer.") else f"trainer.policy.{prefix}"
    seen, target = source.names.get(prefix + "scheduler", ""), section + "scheduler"
    if name in _SCHEDULES:
        values[target], how = _SCHEDULES[name]
        if name == "constant":
            values[section + "num_warmup_steps"] = 0
        elif name == "polynomial" and isinstance(rate, int | float) and rate > _LAST_RATE:
            values[section + "min_lr_factor"] = _LAST_RATE / rate
        conversion.note("translated", seen, target, f"{name}: {how}")
    elif name in _INCOMPLETE_SCHEDULES:
        values.pop(target, None)
        message = f"{name} fails in SkyRL, which hands transformers no {_INCOMPLETE_SCHEDULES[name]}"
        conversion.note("conflict", seen, target, message)
    steps = values.get(section + "num_warmup_steps")
    if isinstance(steps, int) and steps > 0:
        values[section + "warmup_shape"] = "below_lr"
        message = f'step t (from 0) of the warm-up has t / {steps} of the rate, as SkyRL: warmup_shape = "below_lr"'
        seen = source.names.get(path := prefix + "num_warmup_steps", path)
        conversion.note("translated", seen, section + "warmup_shape", message)


def always_packed(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """Leave out that samples are padded with Megatron-core, where they are packed in any case."""
    strategy = source["strategy" if path == "remove_microbatch_padding" else "trainer.strategy"]
    if strategy == "megatron" and source[path] is False:
        conversion.values.pop("trainer.use_sample_packing", None)
        message = "false, but samples are always packed with Megatron-core, which gives the same numbers"
        conversion.note("translated", source.names[path], "trainer.use_sample_packing", message)


def packing(source: SkyrlSource, conversion: Conversion) -> None:
    always_packed(source, conversion, "trainer.use_sample_packing")


def schedules(source: SkyrlSource, conversion: Conversion) -> None:
    for model in ("policy", "critic") if has_critic(source) else ("policy",):
        schedule(source, conversion, f"trainer.{model}.optimizer_config.")


def _instead(old: str, new: str) -> Translation:
    def instead(source: SkyrlSource, conversion: Conversion, path: str) -> None:
        name, value = source.names[path], source.given[path]
        conversion.values[path] = new if value == old else value
        if value == old:
            message = f"there is no {old} here, nor in the present SkyRL; {new} replaces it"
            conversion.note("conflict", name, path, message)
        else:
            conversion.note("mapped", name, path)

    return instead


def strategy(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    if source.given[path] == "fsdp":
        conversion.values[path] = "fsdp2"
        message = "FSDP2 shards the same parameters, offloads what FSDP1 cannot, and is what torch still works on"
        conversion.note("translated", source.names[path], path, message)
    else:
        _instead("deepspeed", "fsdp2")(source, conversion, path)


def weight_sync_backend(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    conversion.values[path], given = "filesystem", source.given[path]
    more = (
        f"{given} works too" if given in ("nccl", "gloo") else "full_weights_interval leaves out what has not changed"
    )
    message = f"{given}: filesystem, new weights reach the engines as files; {more}, with weight_copy_dir"
    conversion.note("translated", source.names[path], path, message)


def use_tis(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    name, target = source.names[path], _CORRECTION + "tis_ratio_type"
    if not source.given[path]:
        conversion.note("mapped", name, "", "false: no weights")
        return
    conversion.values[target] = "token"
    conversion.note("translated", name, target, 'true: "token"')


def tis_imp_ratio_cap(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    name, target, cap = source.names[path], _CORRECTION + "token_tis_ratio_clip_high", source.given[path]
    if not source[_ALGORITHM + "use_tis"]:
        conversion.note("dropped", name, "", "had no effect without use_tis")
    elif isinstance(cap, int | float) and cap > 0:
        conversion.values[target] = cap
        conversion.note("translated", name, target)
    else:
        _faulty_cap(conversion, name, cap)


def _faulty_cap(conversion: Conversion, name: str, cap: Any) -> None:
    target = _CORRECTION + "token_tis_ratio_clip_high"
    conversion.values.pop(target, None)
    conversion.note(
        "translated",
        name,
        target,
        f"a cap of {cap} makes every weight {cap}, a fault of SkyRL's; the default cap counts",
    )


def left_out_cap(source: SkyrlSource, conversion: Conversion) -> None:
    """Note use_tis without a cap, for which SkyRL takes -1, whatever off_policy_correction is."""
    path = _ALGORITHM + "tis_imp_ratio_cap"
    if source[_ALGORITHM + "use_tis"] and path not in source.names:
        _faulty_cap(conversion, path, source[path])


def kl_estimator(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    target = _ALGORITHM + "kl_estimator_type"
    k3 = source[_ALGORITHM + "use_kl_estimator_k3"]
    found = "abs" if source[_ALGORITHM + "use_abs_kl"] else "k3" if k3 or k3 is None else "k1"
    given = source.given.get(target, found)
    conversion.values[target] = given
    if given != found:
        conversion.note(
            "conflict", source.names[path], target, f"would be {found}, but {target} is {given}, which counts"
        )
    else:
        conversion.note("translated", source.names[path], target, found)


def _both_models(last: str) -> Translation:
    def both(source: SkyrlSource, conversion: Conversion, path: str) -> None:
        for model in ("policy", "critic") if has_critic(source) else ("policy",):
            target = f"trainer.{model}.{last}"
            conversion.values[target] = source.given[path]
            conversion.note("translated", source.names[path], target)

    return both


def engine_width(source: SkyrlSource) -> int:
    """Return the GPUs of an engine."""
    return math.prod(source.number(f"{_ENGINE}{kind}_parallel_size") for kind in ("tensor", "pipeline", "data"))


def _engines_of_others(source: SkyrlSource) -> bool:
    return source[_ENGINE + "run_engines_locally"] is False or bool(source[_ENGINE + "external_server_urls"])


def is_colocated(source: SkyrlSource) -> bool:
    """Whether trainer and engines share GPUs here too."""
    return source[_PLACEMENT + "colocate_all"] is True and _cannot_share(source) is None


def _cannot_share(source: SkyrlSource) -> str | None:
    if _engines_of_others(source):
        return "its engines are those that somebody else started"
    nodes, gpus = (source.number(f"{_PLACEMENT}policy_num_{what}") for what in ("nodes", "gpus_per_node"))
    width = engine_width(source)
    fits = nodes * gpus == source.number(_ENGINE + "num_engines") * width and gpus % max(1, width) == 0
    return None if fits else "trainer and engines have different numbers of GPUs"


def colocate_all(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """Also called where the setting is left out, because SkyRL colocates by default. Where it cannot be, engines get nodes of their own."""
    name, value = source.names.get(path, path), source[path]
    if value is not True or is_colocated(source):
        conversion.values[path] = value
        conversion.note("mapped", name, path, "" if path in source.given else "left out: SkyRL's default, true")
        return
    conversion.values[path] = False
    nodes, gpus = (source.number(f"{_PLACEMENT}policy_num_{what}") for what in ("nodes", "gpus_per_node"))
    engines, parallel = source.number(_ENGINE + "num_engines"), engine_width(source)
    if _engines_of_others(source):
        conversion.note("translated", name, path, f"true, but {_cannot_share(source)}")
        return
    conversion.note(
        "translated",
        name,
        path,
        f"true{'' if path in source.given else ' by default'}, but {_cannot_share(source)}; the trainer has {nodes} x {gpus} GPUs, "
        f"{engines} replica(s) of {parallel} GPU(s) have nodes of their own, so that the run needs more nodes than in SkyRL",
    )


def colocate_policy_ref(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    name, value = source.names[path], source.given[path]
    if source[_PLACEMENT + "colocate_all"] is True:
        conversion.note(
            "dropped",
            name,
            "",
            "had no effect with trainer.placement.colocate_all=true; policy and reference share GPUs",
        )
    elif not has_reference(source):
        conversion.note("dropped", name, "", "had no effect, there is no reference model without a KL term")
    else:
        conversion.values[path] = value
        conversion.note("mapped", name, path)


def other_placement(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """Place the reference or the critic, also where the source leaves it to SkyRL's default."""
    name, value = source.names.get(path, path), source[path]
    model, _, what = path.removeprefix(_PLACEMENT).partition("_")
    policy = source[f"{_PLACEMENT}policy_{what}"]
    shared = source[_PLACEMENT + "colocate_all"] is True
    if model == "ref":
        shared, exists = shared or bool(source[_PLACEMENT + "colocate_policy_ref"]), has_reference(source)
    else:
        exists = has_critic(source)
    if not exists:
        if path in source.given:
            conversion.note(
                "dropped", name, "", f"had no effect, there is no {'reference model' if model == 'ref' else 'critic'}"
            )
    elif value == policy and (shared or model == "ref"):  # which is what leaving it out means
        if path in source.given:
            conversion.note("mapped", name, path)
    elif not shared:
        conversion.values[path] = value
        conversion.note("mapped", name, path, "" if path in source.given else f"left out: SkyRL's default, {value}")
    elif path in source.given:
        conversion.note(
            "conflict", name, path, f"{value} differs from the policy's {policy}, whose GPUs it shares; left out"
        )


def shared_sizes(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """Reference and critic on the policy's ranks have its samples here, and so as many ranks that share each."""
    name, value = source.names[path], source.given[path]
    role = "ref" if path.startswith("trainer.ref.") else "critic"
    policy = source[path.replace(role, "policy", 1)]
    shared = source[_PLACEMENT + "colocate_all"] is True
    shared = shared or (role == "ref" and bool(source[_PLACEMENT + "colocate_policy_ref"]))
    if shared and value != policy:
        message = f"left out: on the policy's ranks it has the policy's size, {policy or 'unset'}, and finds the same"
        conversion.note("translated", name, path, message)
    else:
        conversion.values[path] = value
        conversion.note("mapped", name, path)


def resume_mode(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    value, name = source.given[path], source.names[path]
    if value == "from_path":
        checkpoint = source["trainer.resume_path"]
        conversion.note(
            "conflict",
            name,
            "",
            f"{checkpoint} is a checkpoint of SkyRL, which hpcrl cannot read; name an export of it as trainer.policy.model.path",
        )
        return
    conversion.values[path] = "latest" if value in (None, "none") else value
    if value in (None, "none"):
        message = f"{value or 'null'}: latest. A run here begins afresh in any case, and continues itself after a time limit, which it does not with none"
        conversion.note("translated", name, path, message)
    else:
        conversion.note("mapped", name, path)


def resume_path(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    reason = (
        "see trainer.resume_mode"
        if source["trainer.resume_mode"] == "from_path"
        else 'had no effect without trainer.resume_mode="from_path"'
    )
    conversion.note("dropped", source.names[path], "", reason)


def bf16(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    if source.given[path] is False and source["trainer.strategy"] == "megatron":
        for role in ("policy", "ref"):
            conversion.values[f"trainer.{role}.megatron_config.dtype"] = "fp32"
        conversion.note("mapped", source.names[path], "trainer.policy.megatron_config.dtype")
    else:
        conversion.note(
            "dropped",
            source.names[path],
            "",
            "fsdp_config.mixed_precision.param_dtype is the type of computation; the optimizer's copy is fp32",
        )


def max_input_length(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    value, name = source.given[path], source.names[path]
    if value != source["trainer.max_prompt_length"]:  # which is the default here
        conversion.values[path] = value
    conversion.note("mapped", name, path)


def remote_engines(source: SkyrlSource, conversion: Conversion, path: str) -> None:
    """Engines of others, which SkyRL asks for where it starts none: each needs hpcrl's part in it, and has a key."""
    name, target = source.names[path], _ENGINE + "remote_urls"
    local = source[_ENGINE + "run_engines_locally"] is not False
    urls = source[_ENGINE + "external_server_urls"] or ([] if local else source[_ENGINE + "remote_urls"])
    if not urls and not local:
        conversion.note(
            "conflict", name, target, f"false, and there are no addresses of engines; name them in {target}"
        )
    elif not urls:
        conversion.note("dropped", name, "", "the run starts its engines, here too")
    else:
        conversion.values[target] = [url if "://" in url else f"http://{url}" for url in urls]
        conversion.values[_ENGINE + "num_engines"] = len(urls)
        needed = "start each with `hpcrl engine`, and name its key in generator.inference_engine.remote_key_file"
        conversion.note("translated", name, target, needed)


TRANSLATIONS: dict[str, Translation] = {
    "trainer.project_name": name_of_directory,
    "trainer.run_name": name_of_directory,
    "trainer.logger": logger,
    "trainer.strategy": strategy,
    "trainer.bf16": bf16,
    "trainer.resume_mode": resume_mode,
    "trainer.resume_path": resume_path,
    "trainer.num_warmup_steps": _both_models("optimizer_config.num_warmup_steps"),
    "trainer.target_modules": _both_models("model.lora.target_modules"),
    "trainer.exclude_modules": _both_models("model.lora.exclude_modules"),
    _ALGORITHM + "use_tis": use_tis,
    _ALGORITHM + "tis_imp_ratio_cap": tis_imp_ratio_cap,
    _ALGORITHM + "use_kl_estimator_k3": kl_estimator,
    _ALGORITHM + "use_abs_kl": kl_estimator,
    _PLACEMENT + "colocate_all": colocate_all,
    _PLACEMENT + "colocate_policy_ref": colocate_policy_ref,
    _PLACEMENT + "ref_num_nodes": other_placement,
    _PLACEMENT + "ref_num_gpus_per_node": other_placement,
    _PLACEMENT + "critic_num_nodes": other_placement,
    _PLACEMENT + "critic_num_gpus_per_node": other_placement,
    "trainer.ref.sequence_parallel_size": shared_sizes,
    "trainer.critic.sequence_parallel_size": shared_sizes,
    **{f"trainer.ref.megatron_config.{kind}_parallel_size": shared_sizes for kind in _MEGATRON_SIZES},
    _ENGINE + "run_engines_locally": remote_engines,
    _ENGINE + "remote_urls": remote_engines,
    _ENGINE + "external_server_urls": remote_engines,
    _ENGINE + "backend": _instead("sglang", "vllm"),
    _ENGINE + "weight_sync_backend": weight_sync_backend,
    "generator.max_input_length": max_input_length,
    "environment.env_class": env_class,
    "trainer.fully_async.enabled": additions.fully_async,
    "trainer.fully_async.sample_full_batch": additions.full_batches,
    _ALGORITHM + "cispo.cispo_anchor": additions.cispo_anchor,
    "trainer.policy.megatron_config.moe_enable_routing_replay": additions.router_replay,
    _ENGINE + "enable_return_routed_experts": additions.router_replay,
    "trainer.policy.megatron_config.freeze_moe_router": additions.freeze_routers,
    "trainer.policy.torch_profiler_config.skip_first": additions.profiled_from,
    "trainer.policy.torch_profiler_config.wait": additions.profiled_from,
    "trainer.max_tokens_per_microbatch": additions.tokens_per_pass,
    "generator.merge_stepwise_output": additions.joined_steps,
    _ENGINE + "enable_pd": additions.prefill_apart,
    _ENGINE + "speculative_config": additions.drafts,
}
