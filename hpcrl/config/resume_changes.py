"""Judges changed settings of a run that continues from a checkpoint: harmless, a warning, or refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from hpcrl.config.difference import Difference, differences, flat
from hpcrl.config.effects import OTHER_DIRECTORY, OTHER_MOMENTS, OTHER_PLACE, UPDATES
from hpcrl.config.fields import settings
from hpcrl.config.root import Config
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.setting import Effect, Kind


@dataclass(frozen=True)
class Change:
    """A setting that differs, and what that means."""

    difference: Difference
    kind: Kind
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.difference} ({self.reason})"


_OF_MEGATRON = "trainer.policy.megatron_config."
_NEW_THERE = Effect("warning", "only one of the two backends reads it", "warning")
_OF_EXPERTS = Effect(
    "refused", "with target_parameters Megatron-core has an adapter for each expert, and FSDP2 one for all", "refused"
)
_SHARED = Effect("refused", "with lora_type=lora layers share adapters, which FSDP2 has one by one", "refused")
_BETAS = "trainer.policy.optimizer_config.adam_betas"
_OF_AVERAGE = Effect(
    "refused", "checkpoints hold the average of ScheduleFreeAdamW mixed by the first of them", "refused"
)
_YOURS = Effect("warning", "a setting of your own config_class, whose effect hpcrl does not know")


def effect_of(path: str) -> Effect | None:
    """Return the effect of changing a setting of hpcrl's own, or a key of one that is a table; None for any other path."""
    effects = _effects()
    while path and path not in effects:
        path = path.rpartition(".")[0]
    return effects.get(path)


@cache
def _effects() -> dict[str, Effect]:
    return {one.path: one.facts.on_change for one in settings(ConfigTree) if one.facts.on_change}


def _effect_between(difference: Difference, old: Config, new: Config) -> Effect:
    path = difference.path
    effect = effect_of(path) or _YOURS
    if effect is OTHER_MOMENTS and {difference.left, difference.right} <= {"AdamW", "Adam"}:
        return UPDATES  # AdamW and Adam have the same moments
    free = new.trainer.policy.optimizer_config.name == "ScheduleFreeAdamW"
    if free and path == _BETAS and difference.left[0] != difference.right[0]:
        return _OF_AVERAGE
    one, other = sorted((old.trainer, new.trainer), key=lambda trainer: trainer.strategy)
    if one.strategy == other.strategy:
        return effect
    if path == "trainer.strategy":  # fsdp2 comes before megatron
        found = other.adapters
        if any(lora.target_parameters for lora in found.values()):
            return _OF_EXPERTS
        return _SHARED if found and other.policy.megatron_config.lora_type == "lora" else effect
    both_read = path.startswith(f"{_OF_MEGATRON}model_config_kwargs")
    return effect if both_read or not path.startswith(_OF_MEGATRON) or effect.kind != "refused" else _NEW_THERE


def changes(old: Config, new: Config) -> list[Change]:
    """Return the differences between an attempt's configuration and that of the next one, refused ones first."""
    found = []
    for difference in differences(old, new):
        effect = _effect_between(difference, old, new)
        found.append(Change(difference, effect.kind, effect.reason))
    return sorted(found, key=lambda change: ("refused", "warning", "harmless").index(change.kind))


def evaluation_settings(config: Config) -> str:
    """Return the settings that decide the responses and scores of an evaluation, as a text: changeable ones that are not harmless."""
    tree = {
        "generator": asdict(config.generator),
        "environment": asdict(config.environment),
        "python_path": config.python_path,
    }
    settings = {path: value for path, value in flat(tree) if (effect_of(path) or _YOURS).kind != "harmless"}
    return json.dumps(settings, default=str)


def computing_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide what a run computes, by dotted path: neither harmless ones nor paths, whose files have checksums."""
    places = {one.path for one in settings(ConfigTree) if one.location}

    def computes(path: str) -> bool:
        effect = effect_of(path) or _YOURS
        return effect.kind != "harmless" and effect not in (OTHER_DIRECTORY, OTHER_PLACE)

    return {path: value for path, value in flat(asdict(config)) if path not in places and computes(path)}


def changes_from_path(saved: Config, new: Config) -> list[Change]:
    """Return the relevant differences between the run that saved a checkpoint and a run that starts from it."""
    found = []
    for difference in differences(saved, new):
        effect = _effect_between(difference, saved, new)
        if effect.from_path != "harmless":
            found.append(Change(difference, effect.from_path, effect.reason))
    return found
