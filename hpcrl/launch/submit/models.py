"""Models that a configuration names, as far as their config.json lies on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.config import Config, uses_reference
from hpcrl.config.derive import model_config_kwargs, ref_model_path
from hpcrl.config.rules.model_fit import misfits
from hpcrl.config.sections.trainer import TrainerConfig

MODEL_FILE = "config.json"


def is_local(path: str) -> bool:
    """Return whether a location is one on a filesystem, and no name on a hub."""
    return path.startswith(("/", "~", ".")) or Path(path).exists()


def folder_of(path: str) -> Path | None:
    """Return the directory of a model, that in the cache of the hub's library where it has a name there; None: it is not here."""
    folder = Path(path).expanduser() if is_local(path) else _cached(path)
    return folder if folder is not None and (folder / MODEL_FILE).is_file() else None


def _cached(name: str) -> Path | None:
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME", f"{home}/huggingface") + "/hub"
    model = Path(hub).expanduser() / f"models--{name.replace('/', '--')}"
    try:
        return model / "snapshots" / (model / "refs" / "main").read_text().strip()
    except OSError:
        return None


def entries_of(path: str) -> Mapping[str, Any] | None:
    """Return the entries of a model's config.json; None: it is not here, or no JSON."""
    folder = folder_of(path)
    try:
        content = json.loads((folder / MODEL_FILE).read_text()) if folder else None
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_layouts(config: Config) -> Iterator[str]:
    """Yield what Megatron's ranks cannot share of the models, one line each."""
    for path, changes, section, whose in _models(config.trainer):
        entries = entries_of(path)
        if entries is not None:
            sizes = getattr(config.trainer, section).megatron_config
            for found in misfits(f"trainer.{section}.megatron_config", sizes, {**entries, **changes}, whose):
                yield f"{found.path}: {found.message}"


def unchecked_layouts(config: Config) -> list[str]:
    """Return the models whose layout only the job can check, one line each."""
    paths = dict.fromkeys(path for path, *_ in _models(config.trainer))
    return [
        f"{path} is not on this machine, so whether Megatron's ranks can share its heads, layers and experts shows when the job starts"
        for path in paths
        if entries_of(path) is None
    ]


def _models(trainer: TrainerConfig) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """Yield path, changed entries, section with the sizes, and what an error calls it, of each model that Megatron lays out."""
    if trainer.strategy != "megatron":
        return
    policy, ref, critic = trainer.policy, trainer.ref, trainer.critic
    changes = model_config_kwargs(policy)
    yield policy.model.path, changes, "policy", "model"
    reference = ref_model_path(trainer), model_config_kwargs(ref)
    if uses_reference(trainer) and reference != (policy.model.path, changes):
        yield *reference, "ref", "reference model"
    if critic.model.path is not None:  # by the policy's layout
        yield critic.model.path, critic.model_config_kwargs, "policy", "critic"
