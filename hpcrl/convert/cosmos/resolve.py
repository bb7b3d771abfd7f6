"""How Cosmos-RL itself reads a TOML file: defaults, what it changes, what it refuses, and the keys that it silently ignores."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.config.errors import Problem, nearest, raise_together, shown
from hpcrl.config.load import nested
from hpcrl.config.validate import coerce
from hpcrl.convert.cosmos.fields import Field, fields
from hpcrl.convert.cosmos.refuse import refused

_POLICY = "train.train_policy"
_GRPO_KEYS = {"temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward"}
_OF_HPCRL = "a file of hpcrl already, which hpcrl config validate checks"
_FOREIGN = {
    "reward_args": "the configuration of Cosmos-RL's reward service",
    "model_parallel": "a configuration of Cosmos' world foundation models (WFM), whose video diffusion RL has a tree of its own",
    "dataloader_train": "a configuration of Cosmos' world foundation models (WFM), whose video diffusion RL has a tree of its own",
    **dict.fromkeys(("trainer", "generator", "environment", "slurm"), _OF_HPCRL),
}


@dataclass(frozen=True)
class Resolved:
    """A file as Cosmos-RL reads it.

    Attributes:
        values: dotted paths of all fields to their values; fields below a table that is null are missing.
        given: paths of the fields that the file sets, in its order.
        unknown: keys that Cosmos-RL ignores, each with an explanation.
    """

    values: Mapping[str, Any]
    given: tuple[str, ...]
    unknown: Mapping[str, str]

    def __getitem__(self, path: str) -> Any:
        return self.values[path]

    @property
    def tree(self) -> dict[str, Any]:
        """The values as nested tables."""
        return nested({path: copy.deepcopy(value) for path, value in self.values.items()})


def resolve(tree: Mapping[str, Any], source_of: Callable[[str], str | None] = lambda _: None) -> Resolved:
    """Return what Cosmos-RL makes of nested tables. An empty timestamp stays empty, because the clock is not ours.

    Args:
        source_of: file and line that set a dotted path.

    Raises:
        ConfigError: names everything that Cosmos-RL refuses, or that the tree is none of its training configurations.
    """
    _check_kind_of_file(tree, source_of)
    kind = _policy_type(tree)
    known = {field.path: field for field in fields() if field.variant in ("", kind)}
    problems: list[Problem] = []
    unknown: dict[str, str] = {}
    given: dict[str, Any] = {}
    for path, value in _walk(tree, "", known, problems):
        if path not in known:
            unknown[path] = _explained(path, known)
            continue
        given[path], misfits = (
            (value, []) if known[path].is_table else coerce(value, known[path].setting.annotation, path)
        )
        problems += misfits
    values = _with_defaults(given, known)
    if not problems:  # what follows calculates with the values
        problems += _normalise_rewards(values)
    if not problems:
        _normalise(values)
        problems += refused(values)
        _settle(values)
    raise_together(problems, source_of)
    return Resolved(values, tuple(path for path in given if not known[path].is_table), unknown)


def _check_kind_of_file(tree: Mapping[str, Any], source_of: Callable[[str], str | None]) -> None:
    if not tree or "train" in tree:
        return
    found = next((f", but this is {kind}" for key, kind in _FOREIGN.items() if key in tree), "")
    message = f"expected the table [train] of a training configuration of Cosmos-RL{found or '; it is missing'}"
    raise_together([Problem("train", message)], source_of)


def _policy_type(tree: Mapping[str, Any]) -> str:
    """Return grpo or sft: what the file sets, or else what its keys imply."""
    train = tree.get("train", {})
    policy = train.get("train_policy") if isinstance(train, Mapping) else None
    if not isinstance(policy, Mapping):
        return "grpo"
    if policy.get("type") in ("grpo", "sft"):
        return policy["type"]
    return "grpo" if "type" in policy or _GRPO_KEYS & policy.keys() else "sft"


def _walk(
    table: Mapping[str, Any], prefix: str, known: Mapping[str, Field], problems: list[Problem]
) -> Iterator[tuple[str, Any]]:
    """Yield the paths that a file sets: fields, and unknown keys without what lies below them."""
    for key, value in table.items():
        path = f"{prefix}{key}"
        inside = any(other.startswith(path + ".") for other in known)
        if not inside:
            yield path, value
        elif isinstance(value, Mapping):
            yield from ((path, {}) for _ in [0] if path in known)
            yield from _walk(value, path + ".", known, problems)
        else:
            problems.append(Problem(path, f"expected a table, found {shown(value)}"))


def _explained(path: str, known: Mapping[str, Field]) -> str:
    other = next((field.variant for field in fields() if field.path == path), "")
    if other:
        return f'Cosmos-RL has it only with type = "{other}" and ignores it here'
    now = [other for other, field in known.items() if field.since != "seed"]
    tables = {other.rpartition(".")[0] for other in now} - {""}
    near = nearest(path, [*now, *sorted(tables)])
    return "Cosmos-RL does not know it and ignores it" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _with_defaults(given: Mapping[str, Any], known: Mapping[str, Field]) -> dict[str, Any]:
    """Return the values of all fields in their order: a table that is null has none below it."""
    absent = [path + "." for path, field in known.items() if field.is_table and path not in given]
    values: dict[str, Any] = {}
    for path, field in known.items():
        if path in given:
            values[path] = given[path]
        elif field.since != "seed" and not any(path.startswith(table) for table in absent):
            values[path] = copy.deepcopy(field.setting.default)
    return {path: value for path, value in values.items() if not known[path].is_table or path + "." in absent}


def _normalise_rewards(values: dict[str, Any]) -> Iterator[Problem]:
    for path in (f"{_POLICY}.remote_reward.reward_fns", "validation.remote_reward.reward_fns"):
        for index, reward in enumerate(values.get(path) or ()):
            if not isinstance(reward.get("name"), str):
                yield Problem(f"{path}[{index}]", "expected a table with the name of a reward function")
                continue
            numbers = {"weight": 1.0, "clip_min": -5.0, "clip_max": 5.0}
            for name, default in numbers.items():
                found, misfits = coerce(reward.get(name, default), float, f"{path}[{index}].{name}")
                reward[name] = found
                yield from misfits
            reward["score_key"] = reward.get("score_key") or reward["name"]


def _normalise(values: dict[str, Any]) -> None:
    """Bring each value into the one form that the trainer reads."""
    for path in (f"{_POLICY}.dataset.split", "validation.dataset.split", f"{_POLICY}.filter_reward_metric"):
        if isinstance(values.get(path), str):
            values[path] = [values[path]]
    for path in (f"{_POLICY}.reward_function", "validation.reward_function"):
        found = values.get(path)
        if isinstance(found, str | list):
            values[path] = dict.fromkeys([found] if isinstance(found, str) else found, 1.0)
    values["logging.logger"] = [name.lower() for name in values["logging.logger"]]
    if values[f"{_POLICY}.dataloader_num_workers"] <= 0:
        values[f"{_POLICY}.dataloader_num_workers"] = 0
        values[f"{_POLICY}.dataloader_prefetch_factor"] = None
    if (values["train.seed"] is None and values["train.deterministic"]) or (values["train.seed"] or 0) < 0:
        values["train.seed"] = 42
    if values["train.transfer_dtype"] is None:
        values["train.transfer_dtype"] = values["train.master_dtype"]
    if values["distillation.top_k"] <= 0:
        values["distillation.trainer_token_ids_from_teacher"] = False
    if not values["distillation.enable"]:
        values["distillation.top_k"] = 0


def _settle(values: dict[str, Any]) -> None:
    """Set what follows from other settings, where it is the type grpo."""
    if values[f"{_POLICY}.type"] != "grpo":
        values["train.coalesce_weight_sync"] = False
        return
    policy = {name: f"{_POLICY}.{name}" for name in (
        "variant", "on_policy", "allowed_outdated_steps", "outdated_rollout_fetch_batch_size", "max_inflight_steps",
        "dataloader_batch_size", "use_decoupled_loss", "use_rollout_logprobs_for_loss", "rollout_as_token_ids",
        "collect_rollout_logprobs", "bypass_reward", "use_remote_reward",
    )}  # fmt: skip
    decoupled, distilled = values[policy["use_decoupled_loss"]], values["distillation.enable"]
    values[policy["rollout_as_token_ids"]] |= decoupled or distilled
    values[policy["collect_rollout_logprobs"]] |= decoupled or values[policy["use_rollout_logprobs_for_loss"]]
    values[policy["bypass_reward"]] |= distilled
    if values[policy["variant"]] == "dapo" and values[policy["outdated_rollout_fetch_batch_size"]] <= 0:
        values[policy["outdated_rollout_fetch_batch_size"]] = 128
    if (values[policy["dataloader_batch_size"]] or 0) <= 0:
        values[policy["dataloader_batch_size"]] = None
    if values[policy["on_policy"]]:
        values[policy["allowed_outdated_steps"]] = 0
    values["train.coalesce_weight_sync"] &= values[policy["allowed_outdated_steps"]] > 0
    outdated = max(values[policy["allowed_outdated_steps"]], values["train.sync_weight_interval"] - 1)
    values[policy["allowed_outdated_steps"]] = outdated
    if values[policy["max_inflight_steps"]] is not None:
        values[policy["max_inflight_steps"]] = max(values[policy["max_inflight_steps"]], outdated + 1)
    if values["validation.use_remote_reward"] is None:
        values["validation.use_remote_reward"] = values[policy["use_remote_reward"]]
    if "validation.remote_reward" in values:
        del values["validation.remote_reward"]
        below = f"{_POLICY}.remote_reward."
        shared = {path: value for path, value in values.items() if path.startswith(below)}
        values |= {
            "validation.remote_reward." + path.removeprefix(below): copy.deepcopy(value)
            for path, value in shared.items()
        }
