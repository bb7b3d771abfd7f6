"""Optimizers, sharding, adapters and experts of verl's policy, reference and critic."""

from __future__ import annotations

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.rules import Rule, lost, put, seen
from hpcrl.convert.verl.conditions import has_critic, has_reference
from hpcrl.convert.verl.source import VerlSource

_ACTOR, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
_POLICY = "trainer.policy."
_ALL_LINEAR = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
_SIZES = [
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
]
_DDP = ("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective")
_FLASH = {"flash_attention_2": True, "flash": True, "eager": False, "sdpa": False}


def _megatron(source: VerlSource) -> bool:
    return source[_ACTOR + "strategy"] == "megatron"


def _of_model(path: str) -> tuple[str, str]:
    """Return the section of an optimizer's settings in verl, and here."""
    prefix, role = path[: path.index("optim.") + len("optim.")], "critic" if path.startswith("critic.") else "policy"
    return prefix, f"trainer.{role}.optimizer_config."


def _if_trained(rule: Rule[VerlSource]) -> Rule[VerlSource]:
    def checked(source: VerlSource, conversion: Conversion, path: str) -> None:
        if not path.startswith("critic.") or has_critic(source):
            rule(source, conversion, path)
        elif path in source.names:
            conversion.note("dropped", source.names[path], "", "had no effect, there is no critic")

    return checked


def _warmup(source: VerlSource, conversion: Conversion, path: str) -> None:
    prefix, target = _of_model(path)
    steps, ratio = source[prefix + "lr_warmup_steps"], source[prefix + "lr_warmup_steps_ratio"]
    by_steps = isinstance(steps, int) and steps > 0
    if path.endswith("_ratio"):
        if not by_steps and ratio:
            put(source, conversion, path, target + "warmup_ratio", ratio)
        else:
            seen(source, conversion, path, "", "lr_warmup_steps counts" if by_steps else "")
    elif by_steps:
        updates = _updates(source)
        how = f"{steps} steps of {updates} optimizer step(s)" if updates != 1 else ""
        put(source, conversion, path, target + "num_warmup_steps", steps * updates, how)
    else:
        seen(source, conversion, path)
    if path in source.names and (by_steps if path.endswith("steps") else ratio and not by_steps):
        message = (
            "the rate rises with every optimizer step, the first has a part of it already; in verl it stays through a step, and the first has "
            "lr_warmup_init or 0"
        )
        conversion.note("differs", source.names[path], "", message)


def _schedule(source: VerlSource, conversion: Conversion, path: str) -> None:
    _, target = _of_model(path)
    if path.endswith("lr_decay_style") is not _megatron(source):
        if path in source.names:
            conversion.note("dropped", source.names[path], "", "had no effect with this strategy")
        return
    names = {"constant": "constant_with_warmup", "cosine": "cosine"} | (
        {"linear": "linear"} if _megatron(source) else {}
    )
    if source[path] in names:
        found = names[source[path]]
        put(source, conversion, path, target + "scheduler", found, "" if found == source[path] else "constant")
    else:
        lost(
            source,
            conversion,
            path,
            target + "scheduler",
            f"there is no {source[path]}; expected {', '.join(names)}",
        )


def _share(source: VerlSource, conversion: Conversion, path: str) -> None:
    prefix, target = _of_model(path)
    of_megatron, last = (
        not path.endswith("min_lr_ratio"),
        "warmup_start_factor" if path.endswith("init") else "min_lr_factor",
    )
    value, rate = source[path] or 0.0, source[prefix + "lr"]
    if of_megatron and not _megatron(source):
        seen(source, conversion, path, "", "had no effect without Megatron-core")
    elif of_megatron and value:
        put(source, conversion, path, target + last, value / rate, f"{value} of {rate}")
    elif not of_megatron and not _megatron(source) and source[prefix + "lr_scheduler_type"] != "constant":
        put(source, conversion, path, target + last, value)
    else:
        seen(source, conversion, path)


def _name(source: VerlSource, conversion: Conversion, path: str) -> None:
    _, target = _of_model(path)
    names = {"AdamW": "AdamW", "adam": "AdamW", "Adam": "Adam"}
    if source[path] in names:
        put(source, conversion, path, target + "name", names[source[path]])
    else:
        lost(source, conversion, path, target + "name", f"there is no {source[path]}; expected AdamW or Adam")


_OPTIMIZER: dict[str, Rule[VerlSource]] = {
    "lr_warmup_steps": _warmup,
    "lr_warmup_steps_ratio": _warmup,
    "lr_scheduler_type": _schedule,
    "lr_decay_style": _schedule,
    "min_lr_ratio": _share,
    "min_lr": _share,
    "lr_warmup_init": _share,
    "optimizer": _name,
}


def _updates(source: VerlSource) -> int:
    """Return the optimizer steps of a training step."""
    batch, mini = source.number("data.train_batch_size"), source.number(_ACTOR + "ppo_mini_batch_size")
    return max(1, batch // mini) * source.number(_ACTOR + "ppo_epochs")


def _wrap(role: str) -> Rule[VerlSource]:
    def wrap(source: VerlSource, conversion: Conversion, path: str) -> None:
        given = source[path]
        exists = {"policy": True, "ref": has_reference(source), "critic": has_critic(source)}[role]
        kept = {key: value for key, value in given.items() if value not in (0, None, False)} if exists else {}
        if kept:
            put(source, conversion, path, f"trainer.{role}.fsdp_config.wrap_policy", kept)
        else:
            seen(source, conversion, path)

    return wrap


def _sequence(source: VerlSource, conversion: Conversion, path: str) -> None:
    both = [
        source.number(name)
        for name in (_ACTOR + "ulysses_sequence_parallel_size", _ACTOR + "fsdp_config.ulysses_sequence_parallel_size")
    ]
    if _megatron(source):
        seen(source, conversion, path, "", "had no effect with Megatron-core")
    elif path in source.names or max(both) == 1:
        put(source, conversion, path, _POLICY + "sequence_parallel_size", max(both))


def _seed(source: VerlSource, conversion: Conversion, path: str) -> None:
    if (".megatron." in path) is _megatron(source):
        put(source, conversion, path, "trainer.seed", source[path])
    else:
        seen(source, conversion, path, "", "had no effect with this strategy")


def _deterministic(source: VerlSource, conversion: Conversion, path: str) -> None:
    put(source, conversion, path, "trainer.deterministic", bool(source[path]))


def _ddp(source: VerlSource, conversion: Conversion, path: str) -> None:
    for key, value in source[path].items():
        if key in _DDP and _megatron(source):
            put(source, conversion, path, f"{_POLICY}megatron_config.ddp_config.{key}", value)
        elif _megatron(source):
            lost(source, conversion, path, "", f"{key}: expected {', '.join(_DDP)}")
        else:
            seen(source, conversion, path, "", "had no effect without Megatron-core")


def _transformer(role: str) -> Rule[VerlSource]:
    def transformer(source: VerlSource, conversion: Conversion, path: str) -> None:
        if not _megatron(source) or (role == "ref" and not has_reference(source)):
            seen(source, conversion, path, "", "had no effect in this run")
            return
        policy = source[_ACTOR + "megatron.override_transformer_config"]
        fields = dict(source[path]) if path in source.names or role == "policy" else dict(policy)
        backend = fields.pop("attention_backend", "flash")
        if role == "policy" and backend in _FLASH:
            conversion.values["trainer.flash_attn"] = _FLASH[backend]
        recompute = fields.get("recompute_granularity")
        if recompute is None:
            fields = {key: value for key, value in fields.items() if not key.startswith("recompute_")}
            if role == "policy":
                conversion.values["trainer.gradient_checkpointing"] = False
        fields = {key: value for key, value in fields.items() if value is not None}
        target = f"trainer.{role}.megatron_config.transformer_config_kwargs"
        if fields:
            put(source, conversion, path, target, fields)
        else:
            seen(source, conversion, path)
        if recompute is None and role == "policy":
            message = "without recompute_granularity verl recomputes nothing: trainer.gradient_checkpointing = false"
            conversion.note("translated", source.names.get(path, path), "trainer.gradient_checkpointing", message)

    return transformer


def _lora(source: VerlSource, conversion: Conversion, path: str) -> None:
    last = path.removeprefix(_MODEL + "lora.")
    if not _megatron(source):
        seen(source, conversion, path, "", "had no effect without Megatron-core, where lora_rank counts")
        return
    if not source[_MODEL + "lora.rank"] and last != "rank":
        seen(source, conversion, path, "", "had no effect without model.lora.rank")
        return
    target = {
        "type": "megatron_config.lora_type",
        "lora_A_init_method": "model.lora.init_method",
    }.get(last, f"model.lora.{last}")
    value = source[path]
    if last == "merge":
        put(source, conversion, path, "generator.inference_engine.merge_lora", value)
    elif last == "target_modules" and set(value if isinstance(value, list) else [value]) == _ALL_LINEAR:
        put(source, conversion, path, _POLICY + target, "all-linear", "its four modules are every linear layer")
    elif last == "exclude_modules":
        put(source, conversion, path, _POLICY + target, value or None)
    else:
        put(source, conversion, path, _POLICY + target, value)


def _lora_rank(source: VerlSource, conversion: Conversion, path: str) -> None:
    if _megatron(source):
        seen(source, conversion, path, "", "had no effect with Megatron-core, where model.lora.rank counts")
    else:
        put(source, conversion, path, _POLICY + "model.lora.rank", source[path])


def _override(source: VerlSource, conversion: Conversion, path: str) -> None:
    given = dict(source[path])
    own = given.pop("model_config", {})
    experts = given.pop("moe_config", {})
    if isinstance(experts, dict) and experts.get("freeze_moe_router"):
        lost(
            source,
            conversion,
            path,
            "",
            "freeze_moe_router: name the parameters of the router in trainer.policy.freeze_pattern",
        )
    fields = {**given, **own}
    attention = fields.pop("attn_implementation", None)
    if attention in _FLASH:
        put(source, conversion, path, "trainer.flash_attn", _FLASH[attention], f"attn_implementation={attention}")
    elif attention is not None:
        lost(
            source,
            conversion,
            path,
            "trainer.flash_attn",
            f"attn_implementation={attention}: expected {', '.join(_FLASH)}",
        )
    if fields:
        put(source, conversion, path, _POLICY + "model_config_kwargs", fields)
    elif attention is None:
        seen(source, conversion, path)


def _frozen_tower(source: VerlSource, conversion: Conversion, path: str) -> None:
    if source[path]:
        message = 'name the parameters of the tower, such as ["visual"], in trainer.policy.freeze_pattern'
        lost(source, conversion, path, _POLICY + "freeze_pattern", message)
    else:
        seen(source, conversion, path)


def _replay(source: VerlSource, conversion: Conversion, path: str) -> None:
    mode = source[_ACTOR + "router_replay.mode"]
    if path.endswith("mode") and mode in ("R3", "disabled"):
        put(source, conversion, path, _POLICY + "experts.router_replay", "R3" if mode == "R3" else "none")
    elif path.endswith("mode"):
        lost(source, conversion, path, _POLICY + "experts.router_replay", f"{mode}: expected disabled or R3")
    else:
        seen(source, conversion, path, "", "follows from router_replay.mode=R3")


def _reference_size(source: VerlSource, conversion: Conversion, path: str) -> None:
    if not (_megatron(source) and has_reference(source)):
        if path in source.names:
            conversion.note(
                "dropped", source.names[path], "", "had no effect in this run, without a reference on Megatron-core"
            )
        return
    value, last = source[path], path.rpartition(".")[2]
    if value is None:
        value = source[f"{_ACTOR}megatron.{last}"]
    put(source, conversion, path, f"trainer.ref.megatron_config.{last}", value)


def _grad_clip(source: VerlSource, conversion: Conversion, path: str) -> None:
    counts = path.replace("grad_clip", "optim.clip_grad")
    if source[path] == source[counts]:
        seen(source, conversion, path)
    elif path.startswith("actor") or has_critic(source):
        message = f"{source[path]}, but {counts} is {source[counts]}, at which verl's engines of 2026 clip; give both the same value"
        lost(source, conversion, path, "", message)


MODELS: dict[str, Rule[VerlSource]] = {
    **{
        f"{model}.optim.{last}": _if_trained(rule)
        for model in ("actor_rollout_ref.actor", "critic")
        for last, rule in _OPTIMIZER.items()
    },
    _ACTOR + "fsdp_config.wrap_policy": _wrap("policy"),
    "actor_rollout_ref.ref.fsdp_config.wrap_policy": _wrap("ref"),
    "critic.fsdp.wrap_policy": _wrap("critic"),
    _ACTOR + "ulysses_sequence_parallel_size": _sequence,
    _ACTOR + "fsdp_config.ulysses_sequence_parallel_size": _sequence,
    _ACTOR + "fsdp_config.seed": _seed,
    _ACTOR + "megatron.seed": _seed,
    _ACTOR + "fsdp_config.full_determinism": _deterministic,
    _ACTOR + "megatron.override_ddp_config": _ddp,
    _ACTOR + "megatron.override_transformer_config": _transformer("policy"),
    "actor_rollout_ref.ref.megatron.override_transformer_config": _transformer("ref"),
    **{
        f"{_MODEL}lora.{last}": _lora
        for last in (
            "rank",
            "alpha",
            "dropout",
            "target_modules",
            "exclude_modules",
            "type",
            "merge",
            "lora_A_init_method",
        )
    },
    **{f"actor_rollout_ref.ref.megatron.{size}": _reference_size for size in _SIZES},
    _ACTOR + "grad_clip": _grad_clip,
    "critic.grad_clip": _grad_clip,
    _MODEL + "lora_rank": _lora_rank,
    _MODEL + "override_config": _override,
    _ACTOR + "freeze_vision_tower": _frozen_tower,
    _ACTOR + "router_replay.mode": _replay,
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": _replay,
}
