"""Which fields of SkyRL, Cosmos-RL, verl and prime-rl a setting corresponds to, and what has become of each field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Literal

from hpcrl.config.fields import Setting, leaves
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.convert.cosmos import fields as cosmos
from hpcrl.convert.mapping import Dropped, Target, To, rows
from hpcrl.convert.prime import fields as prime
from hpcrl.convert.skyrl import fields as skyrl
from hpcrl.convert.verl import fields as verl

State = Literal["works", "not implemented yet", "not supported"]

SOURCES: dict[str, Mapping[str, Target]] = {
    "SkyRL": skyrl.TARGETS,
    "SkyRL SFT": skyrl.SFT_TARGETS,
    "Cosmos-RL": cosmos.TARGETS,
    "verl": verl.TARGETS,
    "prime-rl": prime.TARGETS,
}

TRL: dict[str, str] = {row["name"]: row["path"] for row in rows("trl.tsv")}
"""Arguments of TRL's trainers and of transformers -> the setting here; names alone, as values and units may differ."""


def paths_of(target: Target) -> tuple[str, ...]:
    """Return the settings that a source's field has become, or that it decides about."""
    if isinstance(target, Dropped):
        return ()
    return (target.path,) if isinstance(target, To) else target.paths


def state_of(target: Target) -> State:
    """Return whether a source's field works here; one that decides about several settings does if all of them work."""
    paths = paths_of(target)
    if not paths:
        return "not supported"
    missing = any(leaf.facts.unimplemented for path in paths for leaf in _leaves(path))
    return "not implemented yet" if missing else "works"


def fields_of(path: str) -> dict[str, list[str]]:
    """Return the fields of each source that have become the setting at `path`, or decide about it."""
    return {source: found for source in SOURCES if (found := _inverse(source).get(path, []))}


def elsewhere(path: str) -> str | None:
    """Return what a name that is no setting here is in other frameworks, and here; None where they have none of this name."""
    for source, targets in SOURCES.items():
        target = targets.get(path)
        if isinstance(target, Dropped):
            return f"one of {source}, which is not supported: {target.reason}"
        if target is not None:
            return f"one of {source}; did you mean {' or '.join(paths_of(target))}?"
    if (name := path.rpartition(".")[2]) in TRL:
        return f"{name} is a setting of TRL or transformers; did you mean {TRL[name]}?"
    return None


def framework_of(unknown: Collection[str]) -> str | None:
    """Return the framework whose files have the unknown names of a file as their tables; None: it is hpcrl's own, or of none."""
    if "train" in unknown and not {"policy", "rollout", "validation"}.isdisjoint(unknown):
        return "Cosmos-RL"
    return "prime-rl" if "orchestrator" in unknown else None


@cache
def _inverse(source: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for field, target in SOURCES[source].items():
        for path in paths_of(target):
            found.setdefault(path, []).append(field)
    return found


def _leaves(path: str) -> Iterator[Setting]:
    """Yield a setting, all settings of a section, or the table whose key, a user's own, the target is."""
    for setting in leaves(ConfigTree):
        if f"{setting.path}.".startswith(f"{path}.") or f"{path}.".startswith(f"{setting.path}."):
            yield setting
