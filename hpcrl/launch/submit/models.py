"""Models that a configuration names, as far as their config.json lies on this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcrl.config import Config, uses_reference
from hpcrl.config.derive import model_config_kwargs, model_paths, ref_model_path
from hpcrl.config.errors import Problem
from hpcrl.config.reward_model import reward_services
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


def on_hub(name: str) -> bool:
    """Return whether the hub, asked once, has a model of this name; False where it cannot be reached, or its library is not installed."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or find_spec("huggingface_hub") is None:
        return False
    import httpx
    from huggingface_hub import file_exists
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    try:
        return file_exists(name, MODEL_FILE)
    except (httpx.HTTPError, HFValidationError, OfflineModeIsEnabled):  # a node without a network
        return False


def fetch_entries(name: str) -> bool:
    """Download the config.json of a model, and nothing else, into the cache of the hub's library; return whether it is here now."""
    if folder_of(name) is None and not is_local(name) and on_hub(name):
        from huggingface_hub import hf_hub_download

        hf_hub_download(name, MODEL_FILE)
    return folder_of(name) is not None


def entries_of(path: str) -> Mapping[str, Any] | None:
    """Return the entries of a model's config.json; None: it is not here, or no JSON."""
    folder = folder_of(path)
    try:
        content = json.loads((folder / MODEL_FILE).read_text()) if folder else None
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_layouts(config: Config) -> Iterator[Problem]:
    """Yield what Megatron's ranks cannot share of the models."""
    for path, changes, section, whose in _models(config.trainer):
        entries = entries_of(path)
        if entries is not None:
            sizes = getattr(config.trainer, section).megatron_config
            yield from misfits(f"trainer.{section}.megatron_config", sizes, {**entries, **changes}, whose)


def unchecked_models(config: Config) -> Iterator[str]:
    """Yield a line for each model that only the job can check, because it is not on this machine."""
    shared = {path for path, *_ in _models(config.trainer)}
    paths = [*model_paths(config.trainer).values()]
    if reward_services(config) and (served := config.environment.remote_reward.service.model):
        paths.append(served)
    for path in dict.fromkeys(paths):
        if is_local(path) or _has_weights(path):
            continue
        shows = "" if entries_of(path) else ", so how many tokens it takes shows when the job starts"
        if shows and path in shared:
            shows = ", so how many tokens it takes, and whether Megatron's ranks can share its heads, layers and experts, shows when the job starts"
        yield (
            f"{path} is not on this machine{shows}; a node without a network cannot download it: `hf download {path}` puts it into the "
            "cache (HF_HOME, on a filesystem that the nodes share)"
        )


def _has_weights(path: str) -> bool:
    folder = folder_of(path)
    return folder is not None and any(any(folder.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))


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
