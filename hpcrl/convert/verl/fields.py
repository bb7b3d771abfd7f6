"""verl's settings (main_ppo, 2026): their names, their defaults, and what becomes of each here.

`fields.tsv` has one more column than the tables of other sources: `lost`, for a setting without a place here whose value, if it is not
the default, makes another run of it. A setting whose default is a table stands for all names below it.
"""

from __future__ import annotations

import json
from typing import Any

from hpcrl.convert.mapping import Target, rows, target_of

_ROWS = rows("verl/fields.tsv")

DEFAULTS: dict[str, Any] = {row["path"]: json.loads(row["default"]) for row in _ROWS}
"""Path of each setting to verl's default with FSDP; one that follows another setting has null."""

MEGATRON_DEFAULTS: dict[str, Any] = {
    "actor_rollout_ref.actor.strategy": "megatron",
    "critic.strategy": "megatron",
    "actor_rollout_ref.rollout.max_num_seqs": 1024,
    "actor_rollout_ref.actor.optim.optimizer": "adam",
    "critic.optim.optimizer": "adam",
}
"""Those that are others in verl's configuration for Megatron-core."""

TARGETS: dict[str, Target] = {row["path"]: target_of(row) for row in _ROWS}
LOST = {row["path"] for row in _ROWS if row["lost"]}
TABLES = {path for path, default in DEFAULTS.items() if default == {}}

RENAMED = {
    "critic.model.fsdp_config.": "critic.fsdp.",
    "custom_reward_function.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.": "reward.reward_model.",
}
"""Beginnings of names that older versions have, to the present ones; the first that fits counts."""

SECTIONS = {path[:end] for path in TARGETS for end, letter in enumerate(path) if letter == "."}


def present(path: str) -> str:
    """Return the present name of a setting that older versions call otherwise."""
    if path in TARGETS:
        return path
    for old, new in RENAMED.items():
        if path == old or path.startswith(old if old.endswith(".") else old + "."):
            return new + path[len(old) :]
    return path


def field_of(path: str) -> str | None:
    """Return the setting that a path names or lies in; None: verl has none."""
    path = present(path)
    while path and path not in TARGETS:
        path = path.rpartition(".")[0]
        if path in TARGETS and path not in TABLES:
            return None
    return path or None
