"""Placement, model, optimizer, checkpoints and names of prime-rl's trainer and engines."""

from __future__ import annotations

from hpcrl.convert.conversion import Conversion, directory_name
from hpcrl.convert.prime.source import PrimeSource
from hpcrl.convert.rules import Rule, lost, put, seen
from hpcrl.convert.sbatch import convert_option

_DEPLOYMENT, _MODEL, _LORA, _OPTIMIZER = (
    "deployment.",
    "trainer.model.",
    "trainer.model.lora.",
    "trainer.policy.optimizer_config.",
)
_ENGINE, _PLACEMENT, _SCHEDULER = "generator.inference_engine.", "trainer.placement.", "trainer.scheduler."
_ATTENTION = {
    "auto": (True, None),
    "flash_attention_2": (True, 2),
    "flash_attention_3": (True, 3),
    "sdpa": (False, None),
    "eager": (False, None),
}
_LEFT_OUT = (
    "max_model_len",
    "tool_call_parser",
    "reasoning_parser",
    "data_parallel_size",
    "enable_auto_tool_choice",
    "api_server_count",
)


def _width(source: PrimeSource) -> int:
    """Return the GPUs of a replica."""
    return max(1, source["inference.vllm"].get("tensor_parallel_size") or source.number("inference.parallel.tp"))


def _ranks(source: PrimeSource) -> tuple[int, int]:
    """Return the nodes of the trainer, and its GPUs on each."""
    if source[_DEPLOYMENT + "type"] == "multi_node":
        return source.number(_DEPLOYMENT + "num_train_nodes"), source.number(_DEPLOYMENT + "gpus_per_node")
    return 1, len(source["trainer_gpu_ids"] or ()) or source.number(_DEPLOYMENT + "num_train_gpus")


def _placement(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if path != _DEPLOYMENT + "type":
        seen(source, conversion, path)
        return
    nodes, gpus = _ranks(source)
    width, several = _width(source), source[path] == "multi_node"
    engines = len(source["inference_gpu_ids"] or ()) or source.number(_DEPLOYMENT + "num_infer_gpus")
    if several:
        replicas = source.number(_DEPLOYMENT + "num_infer_nodes") * source.number(_DEPLOYMENT + "num_infer_replicas")
        engines = replicas * source.number(_DEPLOYMENT + "gpus_per_node")
    conversion.values[_PLACEMENT + "policy_num_nodes"] = nodes
    conversion.values[_PLACEMENT + "policy_num_gpus_per_node"] = gpus
    conversion.values[_PLACEMENT + "colocate_all"] = False
    conversion.values[_ENGINE + "num_engines"] = max(1, engines // width)
    conversion.values["slurm.gpus_per_node"] = most = max(gpus, width)
    message = (
        f"{nodes} node(s) of {gpus} GPU(s) train, {max(1, engines // width)} replica(s) of {width} generate on nodes of their own; "
        f"slurm.gpus_per_node = {most}, the most that one node needs: name what your nodes have"
    )
    conversion.note("translated", source.names.get(path, path), _ENGINE + "num_engines", message)


def _shards(source: PrimeSource, conversion: Conversion, path: str) -> None:
    nodes, gpus = _ranks(source)
    value = source[path]
    if path.endswith("dp_replicate") and value != 1:
        put(
            source,
            conversion,
            path,
            "trainer.policy.fsdp_config.fsdp_size",
            nodes * gpus // value,
            f"{nodes * gpus} ranks over {value}",
        )
    elif path.endswith("nodes_per_fsdp_group") and value:
        put(
            source, conversion, path, "trainer.policy.fsdp_config.fsdp_size", value * gpus, f"{value} node(s) of {gpus}"
        )
    else:
        seen(source, conversion, path)


def _slurm(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if path in source.names and source[path] is not None:
        convert_option(source.names[path], path.removeprefix("slurm.").replace("_", "-"), str(source[path]), conversion)


def _attention(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if source[path] not in _ATTENTION:
        lost(
            source,
            conversion,
            path,
            "trainer.flash_attn",
            f"there is no {source[path]}; expected {', '.join(_ATTENTION)}",
        )
        return
    flash, version = _ATTENTION[source[path]]
    put(source, conversion, path, "trainer.flash_attn", flash, "" if flash else source[path])
    if path in source.names and flash:
        conversion.values["trainer.flash_attn_version"] = version


def _recomputed(source: PrimeSource, conversion: Conversion, path: str) -> None:
    given, offloaded = source[path], source[_MODEL + "ac_offloading"] is not None
    if path.endswith("offloading"):
        put(
            source,
            conversion,
            path,
            "trainer.policy.activation_offload",
            given is not None,
            "" if given is None else "true",
        )
        return
    how = "" if given is None else f"every {given.get('freq', 1)} layer(s)"
    put(source, conversion, path, "trainer.gradient_checkpointing", given is not None or offloaded, how)
    if given:
        conversion.values["trainer.gradient_checkpointing_every"] = given.get("freq", 1)


def _compiled(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if source[path] is not None:
        put(source, conversion, path, "trainer.policy.use_torch_compile", True, "true")


def _sequence(source: PrimeSource, conversion: Conversion, path: str) -> None:
    put(source, conversion, path, "trainer.policy.sequence_parallel_size", source[path])


def _adapter(source: PrimeSource, conversion: Conversion, path: str) -> None:
    last, on = path.removeprefix(_LORA), _LORA.removesuffix(".") in source.tables
    if not on:
        return
    default = {"rank": 16, "target_modules": "all-linear"}.get(last)
    value = default if source[path] is None else source[path]
    if last != "modules_to_save" or value:
        put(source, conversion, path, f"trainer.policy.model.lora.{last}", value)


def _optimizer(source: PrimeSource, conversion: Conversion, path: str) -> None:
    muon = source["trainer.optim.type"] == "muon"
    if path.endswith("betas1"):
        second = 0.95 if muon and "trainer.optim.betas2" not in source.names else source["trainer.optim.betas2"]
        put(source, conversion, path, _OPTIMIZER + "adam_betas", [source[path], second], "betas1 and betas2")
    elif path.endswith("mu"):
        if muon:
            put(source, conversion, path, _OPTIMIZER + "muon_momentum", source[path])
        elif path in source.names:
            conversion.note("dropped", source.names[path], "", "had no effect without optim.type=muon")
    elif path.endswith("betas2"):
        seen(source, conversion, path)
    elif source[path] in (names := {"adamw": "AdamW", "muon": "Muon"}):
        put(source, conversion, path, _OPTIMIZER + "name", names[source[path]], source[path])
    else:
        lost(source, conversion, path, _OPTIMIZER + "name", f"there is no {source[path]}; expected adamw or muon")


def _schedule(source: PrimeSource, conversion: Conversion, path: str) -> None:
    kind, last, steps = source[_SCHEDULER + "type"], path.removeprefix(_SCHEDULER), source["max_steps"]
    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    if last == "type" and kind in names:
        put(source, conversion, path, _OPTIMIZER + "scheduler", names[kind], "" if kind == names[kind] else kind)
    elif last == "type":
        lost(source, conversion, path, _OPTIMIZER + "scheduler", f"there is no {kind}; expected {', '.join(names)}")
    elif kind == "constant" or (last == "decay_steps" and kind != "linear"):
        if path in source.names:
            conversion.note("dropped", source.names[path], "", f"had no effect with scheduler.type={kind}")
    elif last == "warmup_steps":
        put(source, conversion, path, _OPTIMIZER + "num_warmup_steps", source[path])
    elif last == "min_lr":
        put(
            source,
            conversion,
            path,
            _OPTIMIZER + "min_lr_factor",
            source[path] / source["trainer.optim.lr"],
            "as a share of lr",
        )
    elif isinstance(steps, int):
        put(
            source,
            conversion,
            path,
            _OPTIMIZER + "decay_ratio",
            min(1.0, source[path] / steps),
            f"{source[path]} of {steps} steps",
        )


def _checkpoints(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if source[path] is not None:
        put(source, conversion, path, "trainer.ckpt_interval", source[path])
    elif "ckpt" in source.tables and isinstance(source["max_steps"], int):
        put(source, conversion, path, "trainer.ckpt_interval", source["max_steps"], "after the last step alone")
    else:
        message = "left out: prime-rl writes no checkpoints; the default here, so that a run can be continued"
        conversion.note("translated", path, "trainer.ckpt_interval", message)


def _name(source: PrimeSource, conversion: Conversion, path: str) -> None:
    target = "trainer.project_name" if path == "wandb.project" else "trainer.run_name"
    if path == "wandb.project" and "wandb" in source.tables:
        conversion.values["trainer.logger"] = ["tensorboard", "wandb"]
    given = source[path].get("name") if path == "run" else source[path]
    if path in source.names and given is not None:
        valid = directory_name(str(given))
        put(source, conversion, path, target, valid, "" if valid == given else f"{given!r} is no directory name")


def _vision(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if (source[path] or {}).get("freeze_vision_encoder", True) and path in source.names:
        message = 'name the parameters of the vision encoder, such as ["visual"], in trainer.policy.freeze_pattern'
        lost(source, conversion, path, "trainer.policy.freeze_pattern", message)
    else:
        seen(source, conversion, path)


def _replay(source: PrimeSource, conversion: Conversion, path: str) -> None:
    if path.startswith("inference"):
        seen(source, conversion, path)
    else:
        put(
            source,
            conversion,
            path,
            "trainer.policy.experts.router_replay",
            "R3" if source[path] else "none",
            str(source[path]).lower(),
        )


def _engine(source: PrimeSource, conversion: Conversion, path: str) -> None:
    last = path.removeprefix("inference.")
    if last == "parallel.dp":
        seen(source, conversion, path, "", "replicas follow from the GPUs of the deployment")
    elif last == "model.rope_scaling":
        if source[path] is not None:
            put(
                source,
                conversion,
                path,
                "trainer.policy.model_config_kwargs",
                {"rope_scaling": source[path]},
                "of trainer and engines",
            )
    elif last == "enable_expert_parallel":
        put(
            source,
            conversion,
            path,
            _ENGINE + "expert_parallel_size",
            _width(source) if source[path] else 1,
            str(source[path]).lower(),
        )
    else:
        given = {key: value for key, value in source[path].items() if key not in _LEFT_OUT}
        for key in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching"):
            if key in given:
                conversion.values[_ENGINE + key] = given.pop(key)
        if given:
            conversion.values[_ENGINE + "engine_init_kwargs"] = given
        seen(
            source,
            conversion,
            path,
            _ENGINE + "engine_init_kwargs",
            "its options, those of an agent's endpoint left out",
        )


TRAINING: dict[str, Rule[PrimeSource]] = {
    **dict.fromkeys([_DEPLOYMENT + last for last in ("type", "num_train_gpus", "num_train_nodes", "num_infer_gpus", "num_infer_nodes", "num_infer_replicas", "gpus_per_node")], _placement),
    "trainer_gpu_ids": _placement,
    "inference_gpu_ids": _placement,
    _DEPLOYMENT + "nodes_per_fsdp_group": _shards,
    _MODEL + "dp_replicate": _shards,
    **{f"slurm.{last}": _slurm for last in ("job_name", "partition", "account", "time", "nodelist", "exclude", "qos")},
    _MODEL + "attn": _attention,
    _MODEL + "ac": _recomputed,
    _MODEL + "ac_offloading": _recomputed,
    _MODEL + "compile": _compiled,
    _MODEL + "cp": _sequence,
    **{_LORA + last: _adapter for last in ("rank", "alpha", "dropout", "target_modules", "modules_to_save")},
    **{f"trainer.optim.{last}": _optimizer for last in ("type", "betas1", "betas2", "mu")},
    **{_SCHEDULER + last: _schedule for last in ("type", "warmup_steps", "decay_steps", "min_lr")},
    "ckpt.interval": _checkpoints,
    "wandb.project": _name,
    "wandb.name": _name,
    "run": _name,
    "model.vlm": _vision,
    "trainer.enable_router_replay": _replay,
    "inference.enable_return_routed_experts": _replay,
    **{f"inference.{last}": _engine for last in ("parallel.dp", "model.rope_scaling", "enable_expert_parallel", "vllm")},
}  # fmt: skip
