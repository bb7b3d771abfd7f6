"""Checks the models of a configuration whose config.json is on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.config.rules.model_fit import cannot_share, cannot_spread, has_experts, misfits, other_layers
from hpcrl.config.scorers import REFERENCE, SECTIONS, TEACHER, scorer_sets
from hpcrl.config.sections.model import ExpertsConfig, Pretrained
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.data.entries import CONFIG, read_entries
from hpcrl.data.hub.directories import hub_cache
from hpcrl.data.model_config import download
from hpcrl.errors import did_you_mean


def is_local(path: str) -> bool:
    """Return whether a location is one on a filesystem, and no name on a hub."""
    return path.startswith(("/", "~", ".")) or Path(path).exists()


def folder_of(model: Pretrained) -> Path | None:
    """Return the directory of a model, that in the cache of the hub's library where it has a name there; None: it is not here."""
    folder = Path(model.path).expanduser() if is_local(model.path) else _cached(model)
    return folder if folder is not None and (folder / CONFIG).is_file() else None


def _cached(wanted: Pretrained) -> Path | None:
    model = Path(hub_cache(), f"models--{wanted.path.replace('/', '--')}")
    revision = wanted.revision or "main"
    if (model / "snapshots" / revision).is_dir():  # a commit
        return model / "snapshots" / revision
    try:
        return model / "snapshots" / (model / "refs" / revision).read_text().strip()
    except OSError:
        return None


def on_hub(model: Pretrained) -> bool:
    """Return whether the hub, asked once, has this model; False where it cannot be reached, or its library is not installed."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model.path) or find_spec("huggingface_hub") is None:
        return False
    import httpx
    from huggingface_hub import file_exists
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    try:
        return file_exists(model.path, CONFIG, **model.at_revision)
    except (httpx.HTTPError, HFValidationError, OfflineModeIsEnabled):  # a node without a network
        return False


def fetch_entries(model: Pretrained) -> bool:
    """Download the config.json of a model, and nothing else, into the cache of the hub's library; return whether it is here now."""
    if folder_of(model) is None and not is_local(model.path) and on_hub(model):
        from huggingface_hub import hf_hub_download

        hf_hub_download(model.path, CONFIG, **model.at_revision)
    return folder_of(model) is not None


def entries_of(model: Pretrained) -> dict[str, Any] | None:
    """Return the entries of a model's config.json; None: it is not here. Raises DataError as of `read_entries`."""
    folder = folder_of(model)
    try:
        return read_entries(folder / CONFIG) if folder else None
    except OSError:
        return None


def check_layouts(config: Config) -> Iterator[Problem]:
    """Yield what ranks cannot share of the models."""
    for model, changes, path, size, whose in _sharing(config):
        yield from cannot_share(path, size, {**(entries_of(model) or {}), **changes}, whose)
    for model, changes, path, size, whose in _spreading(config):
        entries = entries_of(model)
        yield from cannot_spread(path, size, {**entries, **changes}, whose) if entries is not None else ()
    distillation = config.trainer.distillation
    for model in distillation.teachers if distillation.backend == "megatron" else ():
        path, entries = "trainer.distillation.placement", entries_of(model)
        for problem in misfits(path, distillation.megatron_layout, entries, "teacher") if entries is not None else ():
            yield replace(problem, path=problem.path.replace("_model_parallel_size", "_parallel_size"))
    for model, changes, section, whose in _models(config.trainer):
        entries = entries_of(model)
        if entries is not None:
            sizes = config.trainer.megatron_layout(section)
            yield from misfits(f"trainer.{section}.megatron_config", sizes, {**entries, **changes}, whose)


def rank_problems(configs: Sequence[Config]) -> list[str]:
    """Return the first problem of `check_layouts` for each configuration, or an empty text."""
    return [next((f"{one.path}: {one.message}" for one in check_layouts(config)), "") for config in configs]


def check_packing(config: Config) -> Iterator[Problem]:
    """Yield the models whose samples cannot be packed."""
    if not config.trainer.use_sample_packing or config.trainer.strategy == "megatron":
        return
    for role, model in config.trainer.models.items():
        others = other_layers(entries_of(model) or {})
        if others:
            yield Problem(
                "trainer.use_sample_packing",
                f"{model} (trainer.{role}) has layers that may carry a state from one packed sample into the next ({', '.join(others)}); set it to "
                "false",
            )


def check_routers(config: Config) -> Iterator[Problem]:
    """Yield what is asked of the routers of a policy that has none."""
    asked, own = config.trainer.policy.experts, ExpertsConfig()
    model = config.trainer.policy.model.pretrained
    entries = entries_of(model) if asked != own else None
    if entries is not None and not has_experts(entries | config.trainer.policy.config_overrides):
        name = next(name for name, value in vars(asked).items() if value != vars(own)[name])
        yield Problem(f"trainer.policy.experts.{name}", f"{model} is no mixture of experts; leave it out")


def check_adapters(config: Config) -> Iterator[Problem]:
    """Yield the modules that LoRA names and no weight of the model has in its name; of mixtures, whose classes rename weights, none."""
    trainer = config.trainer
    for role, lora in trainer.adapters.items():
        model = trainer.models[role]
        names = [] if has_experts(entries_of(model) or {}) else _weights_of(model)
        for setting in ("target_modules", "exclude_modules"):
            wanted = getattr(lora, setting) or []
            for part in [wanted] if isinstance(wanted, str) else wanted:
                own = part.rpartition(".")[2]
                # a head may share the weight of the embedding
                if not names or part == "all-linear" or any(own in name for name in (*names, "lm_head")):
                    continue
                leaves = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
                yield Problem(
                    f"trainer.{role}.model.lora.{setting}",
                    f'{model} has no weight with "{part}" in its name{did_you_mean(part, sorted(leaves), 3, 0.3)}',
                )


def _weights_of(model: Pretrained) -> list[str]:
    from safetensors import SafetensorError, safe_open

    folder, names = folder_of(model), list[str]()
    for path in folder.glob("*.safetensors") if folder is not None else ():
        try:
            with safe_open(path, framework="numpy") as file:
                names += file.keys()
        except (OSError, SafetensorError):  # what loads the model explains it
            return []
    return names


def unchecked_models(config: Config) -> Iterator[str]:
    """Yield a line for each model that only the job can check, because it is not on this machine."""
    shared = {model for model, *_ in _models(config.trainer)}
    models = [*config.trainer.models.values()]
    if config.reward_services and (served := config.environment.remote_reward.service.model):
        models.append(Pretrained(served))
    models += [scorers.model for scorers in scorer_sets(config)]
    for model in dict.fromkeys(models):
        if is_local(model.path) or _has_weights(model):
            continue
        shows = "" if entries_of(model) else ", so how many tokens it takes shows when the job starts"
        if shows and model in shared:
            shows = ", so how many tokens it takes, and whether Megatron's ranks can share its heads, layers and experts, shows when the job starts"
        yield (
            f"{model} is not on this machine{shows}; a node without a network cannot download it: `{download(model)}` puts it into the "
            "cache (HF_HOME, on a filesystem that the nodes share)"
        )


def _has_weights(model: Pretrained) -> bool:
    folder = folder_of(model)
    return folder is not None and any(any(folder.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))


def _sharing(config: Config) -> Iterator[tuple[Pretrained, dict[str, Any], str, int, str]]:
    """Yield model, changed entries, setting, its value, and what an error calls the model, of each whose ranks share tokens with FSDP2."""
    trainer, size = config.trainer, "sequence_parallel_size"
    if trainer.strategy == "fsdp2":
        policy = trainer.policy.model.pretrained, trainer.policy.config_overrides
        yield *policy, f"trainer.policy.{size}", trainer.model_parallel_size, "model"
        reference, ranks = (trainer.ref_model, trainer.ref.config_overrides), trainer.ref_model_parallel_size
        if trainer.uses_reference and (*reference, ranks) != (*policy, trainer.model_parallel_size):
            yield *reference, f"trainer.ref.{size}", ranks, "reference model"
        if (critic := trainer.critic.model.pretrained) is not None:
            changes = trainer.critic.model_config_kwargs
            yield critic, changes, f"trainer.critic.{size}", trainer.critic_model_parallel_size, "critic"
    for scorers in scorer_sets(config):
        if scorers.role == TEACHER:
            yield scorers.model, {}, f"trainer.distillation.placement.{size}", scorers.sharing, "teacher"


def _spreading(config: Config) -> Iterator[tuple[Pretrained, dict[str, Any], str, int, str]]:
    trainer, size = config.trainer, "fsdp_config.expert_parallel_size"
    if trainer.strategy == "fsdp2":
        policy, ref, critic = trainer.policy, trainer.ref, trainer.critic
        sizes = policy.fsdp_config.expert_parallel_size
        yield trainer.policy.model.pretrained, policy.config_overrides, f"trainer.policy.{size}", sizes, "model"
        if trainer.colocated_reference:
            sizes = ref.fsdp_config.expert_parallel_size
            yield trainer.ref_model, ref.config_overrides, f"trainer.ref.{size}", sizes, "reference model"
        if (model := trainer.critic.model.pretrained) is not None:
            sizes = critic.fsdp_config.expert_parallel_size
            yield model, critic.model_config_kwargs, f"trainer.critic.{size}", sizes, "critic"
    for each in scorer_sets(config):
        if not each.engine:
            changes = trainer.ref.config_overrides if each.role == REFERENCE else {}
            yield each.model, changes, f"{SECTIONS[each.role]}.{size}", each.fsdp.expert_parallel_size, each.title


def _models(trainer: TrainerConfig) -> Iterator[tuple[Pretrained, dict[str, Any], str, str]]:
    """Yield model, changed entries, section with the sizes, and what an error calls it, of each model that Megatron lays out."""
    if trainer.strategy != "megatron":
        return
    policy, ref = trainer.policy, trainer.ref
    changes = policy.config_overrides
    yield trainer.policy.model.pretrained, changes, "policy", "model"
    reference = trainer.ref_model, ref.config_overrides
    if trainer.colocated_reference and reference != (trainer.policy.model.pretrained, changes):
        yield *reference, "ref", "reference model"
    if (critic := trainer.critic.model.pretrained) is not None:  # by the policy's layout
        yield critic, trainer.critic.model_config_kwargs, "policy", "critic"
