"""Environments of prime-rl, which are tasksets of verifiers: their rows, and the agent that plays them."""

from __future__ import annotations

import json
from typing import Any

from hpcrl.convert.conversion import Conversion, directory_name
from hpcrl.convert.prime.source import PrimeSource
from hpcrl.convert.rules import Rule, lost, put, seen

_TRAIN, _EVAL = "orchestrator.train.", "orchestrator.eval."
_HARMLESS = ("name", "max_retries", "timeout", "num_workers", "pool", "address", "max_output_tokens")
_OF_BLOCK = ("env", "taskset", "harness", "agent", "id", "args")
_OF_EVALUATION = ("group_size", "rollouts_per_example", "num_examples", "interval")
_REASONS = {
    "curriculum": "groups whose rewards are all equal are left out, or generated again, by trainer.algorithm.dynamic_sampling",
    "ratio": "datasets are mixed by their numbers of rows",
}
_TURNS = 100


def _items(source: PrimeSource, path: str) -> list[dict[str, Any]]:
    given = source[path]
    return [item for item in (given if isinstance(given, list) else [given]) if isinstance(item, dict)]


def has_evaluation(source: PrimeSource) -> bool:
    """Return whether prime-rl's run evaluates."""
    return bool(_items(source, _EVAL + "env"))


def _block(item: dict[str, Any]) -> dict[str, Any] | None:
    """Return what verifiers calls the block [env]; None: the environment is of its older interface, or names no taskset."""
    block = dict(item.get("env") or {key: item[key] for key in ("taskset", "agent") if key in item})
    if "harness" in item:
        block["agent"] = {"harness": item["harness"]}
    if not isinstance(block.get("taskset"), dict):
        return None
    for role, agent in block.items():
        harness = agent.get("harness") if isinstance(agent, dict) else None
        if isinstance(harness, dict) and "runtime" in harness:
            kept = {key: value for key, value in harness.items() if key != "runtime"}
            block[role] = {**agent, "harness": kept, "runtime": harness["runtime"]}
    return block


def _environments(source: PrimeSource, conversion: Conversion, path: str) -> None:
    items, training = _items(source, path), path.startswith(_TRAIN)
    target = "data.train_data" if training else "data.val_data"
    files, turns = list[str](), list[int]()
    for item in items:
        block = _block(item)
        allowed = (*_HARMLESS, *_OF_BLOCK, *(() if training else _OF_EVALUATION))
        for key in sorted(set(item) - set(allowed)):
            reason = _REASONS.get(key, "all environments have the same sampling, group size and algorithm")
            lost(source, conversion, path, target, f"{key} of an environment: {reason}")
        if block is None:
            message = (
                f"{item.get('id')}: of verifiers' older interface, by id; name its taskset (env.taskset.id), or write the environment for "
                "hpcrl (docs/environments)"
            )
            lost(source, conversion, path, target, message)
            continue
        most = block["taskset"].get("max_turns")
        turns.append(most if isinstance(most, int) else _TURNS)
        file = (directory_name(str(item.get("name") or block["taskset"].get("id"))) or "rows") + ".jsonl"
        files.append(file)
        message = (
            f"{file}, which `python configs/agents/verifiers_agent.py '{json.dumps(block)}' > {file}` writes; an agent plays its rows, with the "
            "Python that has verifiers (docs/agents.md)"
        )
        conversion.note("translated", source.names.get(path, path), target, message)
    if training and not items:
        lost(source, conversion, path, target, "no environment is named; name datasets and an environment")
    if files:
        conversion.values[target] = files
        conversion.values["environment.env_class"] = "agent"
        conversion.values["environment.skyrl_gym.agent.command"] = ["python", "./agents/verifiers_agent.py"]
        conversion.values["generator.inference_engine.enable_http_endpoint"] = True
        conversion.values["generator.max_turns"] = max([conversion.values.get("generator.max_turns", 1), *turns])


def _of_evaluation(source: PrimeSource, conversion: Conversion, path: str) -> None:
    last = path.removeprefix(_EVAL)
    if not has_evaluation(source):
        if last == "interval":
            put(source, conversion, path, "trainer.eval_interval", -1, "no evaluation environments")
        else:
            conversion.note(
                "dropped", source.names.get(path, path), "", "had no effect without evaluation environments"
            )
    elif last == "sampling.temperature":
        value = 1.0 if source[path] is None else source[path]
        how = "the engine's default" if source[path] is None else ""
        put(source, conversion, path, "generator.eval_sampling_params.temperature", value, how)
    elif last == "sampling.reasoning_effort":
        if source[path] is not None:
            put(
                source,
                conversion,
                path,
                "generator.chat_template_kwargs",
                {"reasoning_effort": source[path]},
                "in training too",
            )
    elif last == "skip_first_step":
        put(source, conversion, path, "trainer.eval_before_train", not source[path], str(source[path]).lower())
    elif last == "interval":
        _one_value(source, conversion, path, "trainer.eval_interval", ("interval",))
    elif last == "group_size":
        _one_value(source, conversion, path, "generator.eval_n_samples_per_prompt", _OF_EVALUATION[:2])
    else:
        _one_value(source, conversion, path, "data.val_size", ("num_examples",))


def _one_value(source: PrimeSource, conversion: Conversion, path: str, target: str, keys: tuple[str, ...]) -> None:
    """Write a number that each evaluation environment may have for itself, and that is one for all here."""
    items = _items(source, _EVAL + "env")
    values = {next((item[key] for key in keys if key in item), source[path]) for item in items}
    if len(values) > 1:
        message = (
            f"evaluation environments have {', '.join(map(str, sorted(values)))}, here one number is for all; write it"
        )
        lost(source, conversion, path, target, message)
    elif (value := values.pop()) == -1:
        seen(source, conversion, path)
    elif target == "data.val_size" and len(items) > 1:
        lost(source, conversion, path, target, "of each of several environments; shorten the files of rows")
    else:
        put(source, conversion, path, target, value)


ENVIRONMENTS: dict[str, Rule[PrimeSource]] = {
    _TRAIN + "env": _environments,
    _EVAL + "env": _environments,
    **{
        _EVAL + last: _of_evaluation
        for last in (
            "interval",
            "skip_first_step",
            "group_size",
            "num_examples",
            "sampling.temperature",
            "sampling.reasoning_effort",
        )
    },
}
