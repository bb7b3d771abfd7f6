"""Settings of data, rewards, rollouts, evaluation and names that follow from several fields of Cosmos-RL; as in cosmos_training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from hpcrl.config.backend import OPTIONAL, backends
from hpcrl.convert.conversion import Entry, directory_name
from hpcrl.convert.cosmos.conditions import (
    CUSTOM_OF_DPO,
    POLICY,
    ROBOT_TRAINERS,
    is_grpo,
    is_preference,
    is_robot,
    moves_by_flow,
    scores_itself,
)
from hpcrl.convert.cosmos.resolve import Resolved
from hpcrl.convert.cosmos.robots import robots
from hpcrl.convert.cosmos.training import Rule

_ENGINE = "generator.inference_engine"
_TRAINERS = {"grpo": ("grpo", "diffusion_nft", *ROBOT_TRAINERS), "sft": ("sft", "dpo", "diffusers_sft", "pi_sft")}
_NO_ENGINES, _PICTURES = ("vla",), "diffusion_nft_rollout"
_SHOWN_BY = ("wandb", "console")
_PROFILER = "profiler.enable_profiler"
_TENTH = 0.1


def kind_of_run(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    trainer, backend = source[f"{POLICY}.trainer_type"], source["rollout.backend"]
    values["vla.enable"] = is_robot(source)
    known = _TRAINERS[source[f"{POLICY}.type"]]
    if trainer not in known:
        message = f'"{trainer}" is no trainer of hpcrl; those of Cosmos-RL that it covers: {", ".join(known)}'
        yield Entry("conflict", f"{POLICY}.trainer_type", "", message)
    if not is_grpo(source):
        return
    values["trainer.placement.colocate_all"] = source["mode"] != "disaggregated"
    if values["trainer.placement.colocate_all"]:  # each of its processes generates too
        ranks = math.prod(values[f"trainer.placement.policy_num_{what}"] for what in ("nodes", "gpus_per_node"))
        width = math.prod(max(1, source[f"rollout.parallelism.{size}_size"]) for size in ("tp", "pp", "dp_shard"))
        values[f"{_ENGINE}.num_engines"] = max(1, ranks // width)
    if backend in ("vllm", "vllm_async"):
        values[f"{_ENGINE}.backend"] = "vllm"
    elif backend == _PICTURES:
        values[f"{_ENGINE}.backend"] = "diffusers"
        for name in set(OPTIONAL).difference(backends()["diffusers"].reads):
            values.pop(f"{_ENGINE}.{name}", None)
    elif backend not in _NO_ENGINES:
        yield Entry("conflict", "rollout.backend", f"{_ENGINE}.backend", f'vllm is the only engine, found "{backend}"')


def datasets(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    values["data.train_data"] = _named(source, f"{POLICY}.dataset") or None
    if values["data.train_data"] is None:
        message = "the source takes the dataset from the script that starts it; name it in data.train_data"
        yield Entry("conflict", f"{POLICY}.dataset.name", "data.train_data", message)
    evaluation = "validation.dataset"
    if not source["validation.enable"]:
        return
    folder = source[f"{evaluation}.local_dir"]
    if named := _named(source, evaluation):
        values["data.val_data"] = named
        if source[f"{evaluation}.test_size"] is not None:
            message = "the source's countdown_distill.py and deepmath_distill.py evaluate that share, other scripts every row; set data.val_size in the first case"
            yield Entry("conflict", f"{evaluation}.test_size", "data.val_size", message)
    elif folder:
        values["data.val_local_dir"] = None
        message = f"the source evaluates the rows of {folder}; name them in data.val_data"
        yield Entry("conflict", f"{evaluation}.local_dir", "data.val_data", message)
    else:
        size = source[f"{POLICY}.dataset.test_size"]
        values["data.test_size"] = _TENTH if size is None else size


def _named(source: Resolved, dataset: str) -> list[str]:
    name, splits = source[f"{dataset}.name"], source[f"{dataset}.split"] or [""]
    return [f"{name}:{split}" if split else name for split in splits] if name else []


def rewards(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    if not is_grpo(source):
        return
    if source[f"{POLICY}.bypass_reward"] and not source["distillation.enable"]:
        message = "every reward would be 0, from which nothing is learned; it serves distillation"
        yield Entry("conflict", f"{POLICY}.bypass_reward", "environment.reward_function", message)
    filters, named = source[f"{POLICY}.filter_reward_metric"], source[f"{POLICY}.reward_function"]
    if scores_itself(source) and (added := [name for name in filters if name not in named]):
        values["environment.reward_function"] = {**named, **dict.fromkeys(added, 0.0)}
        message = f"{', '.join(added)} with weight 0: reported and used for filtering, but not part of the reward"
        yield Entry("translated", f"{POLICY}.filter_reward_metric", "environment.reward_function", message)
    if not source[f"{POLICY}.use_remote_reward"]:
        return
    remote, path = f"{POLICY}.remote_reward", "environment.remote_reward"
    if f"{remote}.reward_fn" in source.given:
        return
    functions = source[f"{remote}.reward_fns"]
    values[f"{path}.reward_function"] = {function["name"]: function["weight"] for function in functions}
    keys = list(dict.fromkeys(function["score_key"] for function in functions))
    values[f"{path}.score_key"] = keys[0] if keys else None
    low, high = source[f"{remote}.reward_clip_min"], source[f"{remote}.reward_clip_max"]
    if len(functions) == 1 and functions[0]["weight"] == 1:
        values[f"{path}.clip_min"] = max(low, functions[0]["clip_min"])
        values[f"{path}.clip_max"] = min(high, functions[0]["clip_max"])
    elif len(keys) > 1 or any((function["clip_min"], function["clip_max"]) != (low, high) for function in functions):
        message = (
            "score_key, clip_min and clip_max of single functions have no setting here; those of the whole are kept"
        )
        yield Entry("conflict", f"{remote}.reward_fns", path, message)


def sampling(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    if not is_grpo(source):
        return
    if source[f"{POLICY}.variant"] == "dapo":
        values["trainer.algorithm.dynamic_sampling.type"] = "filter"
    copies = source["rollout.parallelism.dp_shard_size"]
    values[f"{_ENGINE}.data_parallel_size"] = max(1, copies)
    if copies == -1:
        message = "the source takes as many GPUs as it is given; set the number, or num_engines, here"
        yield Entry("conflict", "rollout.parallelism.dp_shard_size", f"{_ENGINE}.data_parallel_size", message)
    turns = source["mode"] != "disaggregated"
    values["trainer.fully_async.max_staleness_steps"] = 0 if turns else source[f"{POLICY}.allowed_outdated_steps"]
    values["trainer.fully_async.sync_weight_interval"] = 1 if turns else source["train.sync_weight_interval"]
    if turns and f"{POLICY}.allowed_outdated_steps" in source.given and source[f"{POLICY}.allowed_outdated_steps"]:
        message = "0: trainer and engines take turns on their GPUs"
        yield Entry(
            "translated", f"{POLICY}.allowed_outdated_steps", "trainer.fully_async.max_staleness_steps", message
        )


def several_turns(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    config = "rollout.multi_turn_config"
    if not is_grpo(source) or not source[f"{config}.enable"]:
        return
    values["generator.max_turns"] = source[f"{config}.max_assistant_turns"]
    if values.pop("environment.reward_function", None):
        message = (
            "what comes between turns is written by a script in the source, and here by an environment, which also scores: write one "
            "(docs/environments), and name it in environment.env_class"
        )
        yield Entry("conflict", f"{config}.enable", "environment.env_class", message)
    values["generator.chat_template_kwargs"] = {"enable_thinking": source[f"{config}.enable_thinking"]}
    template = source[f"{config}.custom_chat_template_path"]
    if template:
        values["generator.chat_template.source"] = "file"
        values["generator.chat_template.name_or_path"] = template
    for name, expected in (("add_generation_prompt", True), ("continue_final_message", False)):
        if source[f"{config}.{name}"] != expected:
            message = f"expected {str(expected).lower()}: each turn is a new message of the assistant"
            yield Entry("conflict", f"{config}.{name}", "", message)


def evaluation(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    values["trainer.eval_interval"] = source["validation.freq"] if source["validation.enable"] else -1
    own, shared = "validation.remote_reward", f"{POLICY}.remote_reward"
    names = ("scale", "reward_fns", "reward_clip_min", "reward_clip_max")
    remote = is_grpo(source) and source["validation.enable"] and source[f"{POLICY}.use_remote_reward"]
    if remote and any(source[f"{own}.{name}"] != source[f"{shared}.{name}"] for name in names):
        message = "evaluation has no reward service of its own; that of training is kept"
        yield Entry("conflict", own, "environment.remote_reward", message)


def distillation(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    path, target = "distillation.parallelism.dp_shard_size", "trainer.distillation.placement.fsdp_size"
    if not is_grpo(source) or not source["distillation.enable"]:
        return
    sizes = {name: source[f"distillation.parallelism.{name}_size"] for name in ("tp", "pp", "ep")}
    if shared := [name for name, size in sizes.items() if size > 1]:
        values["trainer.distillation.backend"] = "megatron"
        if source[path] not in (1, -1):
            message = f"a teacher whose ranks share layers ({', '.join(f'{name}_size' for name in shared)}) is not sharded besides"
            yield Entry("conflict", path, target, message)
        return
    values[target] = max(1, source[path]) * source["distillation.parallelism.cp_size"]
    if source[path] == -1:
        yield Entry("conflict", path, target, "the source takes as many GPUs as it is given; set the number here")


def names(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    project, experiment, output = "logging.project_name", "logging.experiment_name", "train.output_dir"
    if project in source.given:
        values["trainer.project_name"] = directory_name(source[project])
    named = source[experiment] not in (None, "", "None")
    run = source[experiment] if named else PurePosixPath(source[output]).name if output in source.given else ""
    stamp = source["train.timestamp"]
    values["trainer.run_name"] = directory_name(f"{run}-{stamp}" if run and stamp else run or stamp)
    absolute = output in source.given and source[output].startswith(("/", "~"))
    if absolute:
        values |= {"slurm.checkpoint_root": source[output], "slurm.export_root": source[output]}
    if named and output in source.given and not absolute:
        yield Entry("dropped", output, "", f"the run is named after {experiment}; it lies below slurm.root")
    elif experiment in source.given and not named:
        yield Entry("translated", experiment, "trainer.run_name", "none: the run is named after train.output_dir")


def logging(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    names = source["logging.logger"]
    values["trainer.logger"] = [name for name in names if name in _SHOWN_BY] or None
    values["trainer.profiler.ranks"] = source["profiler.sub_profiler_config.rank_filter"] or [0]
    if source[_PROFILER] and source["profiler.enable_nsys"]:
        values["trainer.profiler.enable"] = False
        yield Entry("dropped", _PROFILER, "", "Nsight Systems records these steps: one profiler at a time")
    if others := [name for name in names if name not in _SHOWN_BY]:
        yield Entry("conflict", "logging.logger", "trainer.logger", f"Cosmos-RL has no logger {', '.join(others)}")


def custom(source: Resolved, values: dict[str, Any]) -> Iterator[Entry]:
    of_trainers = CUSTOM_OF_DPO if is_preference(source) else ("pi05",) if moves_by_flow(source) else ()
    values["environment.custom"] = {name: value for name, value in source["custom"].items() if name not in of_trainers}
    if values["environment.custom"]:
        message = "environments and rewards get it; plugins of models and trainers, which read it in Cosmos-RL too, are not here"
        yield Entry("mapped", "custom", "environment.custom", message)


RULES: tuple[Rule, ...] = (
    kind_of_run,
    datasets,
    rewards,
    sampling,
    several_turns,
    evaluation,
    distillation,
    robots,
    names,
    logging,
    custom,
)
