"""Refuses settings without effect: those that another setting switches on (`used_by`), where it does not.

This holds for all settings that bear on the result. Settings of how an optional part runs (sections slurm, trainer.ref,
trainer.profiler) may stay: one site file serves runs with and without containers, one sweep runs with and without a reference. A loss or an advantage estimator of the user's own may read any setting of trainer.algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, reduce
from typing import Any

from hpcrl.config.errors import Problem
from hpcrl.config.fields import settings, values
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.setting import When


def not_switched_on(config: ConfigTree) -> Iterator[Problem]:
    """Yield a problem for each setting that is not at its default and has no effect, with the first condition that fails."""
    algorithm = config.trainer.algorithm
    own = ":" in algorithm.policy_loss_type or ":" in algorithm.advantage_estimator
    for setting, value in values(config):
        if setting.is_default(value):
            continue
        for condition, section in _conditions().get(setting.path, ()):
            if own and section.startswith("trainer.algorithm"):
                continue
            if not any(test(_value(config, path, section)) for path, test in condition.tests):
                needs = condition.needs.format(section=section)
                yield Problem(setting.path, f"has no effect without {needs}; leave it out, or set that")
                break


@cache
def _conditions() -> dict[str, list[tuple[When, str]]]:
    """Return the conditions of each setting and section, those of the sections around it first, each with the section that declares it."""
    found: dict[str, list[tuple[When, str]]] = {}
    for setting in settings(ConfigTree):
        section = setting.path.rpartition(".")[0]
        own = setting.facts.used_by
        replaced = {path for condition in own for path in _paths(condition, section)}
        around = [pair for pair in found.get(section, ()) if replaced.isdisjoint(_paths(*pair))]
        found[setting.path] = around + [(condition, section) for condition in own]
    return found


def _paths(condition: When, section: str) -> list[str]:
    return [section + path if path.startswith(".") else path for path, _ in condition.tests]


def _value(config: ConfigTree, path: str, section: str) -> Any:
    return reduce(getattr, (section + path if path.startswith(".") else path).split("."), config)
