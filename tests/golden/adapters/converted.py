"""Configurations as a user gets them: through the converter, and refused where it or the checks refuse."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import tomli_w
import yaml

from hpcrl.config import Config
from hpcrl.config.errors import Problem, raise_together
from hpcrl.config.load import nested
from hpcrl.config.rules.combinations import impossible
from hpcrl.config.validate import build
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.cosmos.convert import convert_toml
from hpcrl.convert.skyrl.convert import convert_overrides
from hpcrl.convert.skyrl.fields import SKYRL_DEFAULTS

_ORIGIN = "a golden case"
_COLOCATED = "trainer.placement.colocate_all"
_COSMOS_BASE: dict[str, Any] = {
    "policy.model_name_or_path": "model",
    "train.train_batch_per_replica": 16,
    "rollout.n_generation": 16,
    "train.train_policy.type": "grpo",
    "train.train_policy.dataset.name": "prompts.parquet",
}


def skyrl(overrides: Mapping[str, Any], *, checked: bool = True) -> Config:
    """Return what SkyRL's overrides become.

    Where SkyRL lets trainer and engines share GPUs, its default, and they cannot here, the converter gives engines nodes of their own; that
    sharing would work is checked too, because SkyRL checks it. Features that are still to be built refuse nothing here.

    Args:
        overrides: dotted names to values, YAML where they are text.
        checked: whether settings that do not fit together are refused. Arithmetic is compared without: hpcrl refuses more than
            SkyRL, and what it refuses has a value all the same. Unknown names and values of wrong types are refused in any case.

    Raises:
        ConfigError: the converter or a check refuses them.
    """
    return _skyrl(json.dumps(overrides), checked)


@cache
def _skyrl(overrides: str, checked: bool) -> Config:
    given = json.loads(overrides)
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]
    conversion = convert_overrides(words, _ORIGIN)
    _refuse(conversion, ("unknown", "conflict") if checked else ("unknown",))
    value = given.get(_COLOCATED, SKYRL_DEFAULTS[_COLOCATED])
    if checked and (yaml.safe_load(value) if isinstance(value, str) else value) is True:
        raise_together(impossible(_built({**conversion.values, _COLOCATED: True})), lambda _: None)
    return _built(conversion.values)


def cosmos(settings: Mapping[str, Any]) -> Config:
    """Return what a file of Cosmos-RL becomes; a model, a dataset and a batch that groups divide are added.

    Args:
        settings: dotted names to values; those that are None are left out.

    Raises:
        ConfigError: Cosmos-RL, the converter or a check refuses it.
    """
    given = {name: value for name, value in {**_COSMOS_BASE, **settings}.items() if value is not None}
    conversion = convert_toml(tomli_w.dumps(nested(given)), _ORIGIN)
    _refuse(conversion, ("unknown", "conflict"))
    return _built(conversion.values)


def _refuse(conversion: Conversion, kinds: Collection[str]) -> None:
    wrong = [entry for entry in conversion.entries if entry.kind in kinds]
    raise_together([Problem(entry.source, entry.message) for entry in wrong], lambda _: None)


def _built(values: Mapping[str, Any]) -> Config:
    return build(Config, nested(values))


def dotted(prefix: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested tables by dotted names below `prefix`."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= dotted(f"{prefix}.{name}", value) if isinstance(value, Mapping) else {f"{prefix}.{name}": value}
    return found


def expect_constant(given: Mapping[str, Any], name: str, value: Any) -> None:
    """Raise LookupError where a case has another value than the one that hpcrl has built in."""
    if given.get(name, value) != value:
        raise LookupError(f"{name}: hpcrl has {value}, and no setting for it; found {given[name]}")
