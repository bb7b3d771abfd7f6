"""Checks a run before it is queued: its files, its own code, models that its ranks or engines cannot use, and its first checkpoint."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcrl.config import Config, EnvironmentConfig
from hpcrl.config.errors import Problem, raise_together
from hpcrl.config.family import Family, family_of
from hpcrl.config.import_path import missing_packages
from hpcrl.config.resume_changes import Change, changes_from_path
from hpcrl.config.sections.alerts import AlertsConfig
from hpcrl.config.sections.environment import CLASSIFIER
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.trainer import steps_per_epoch
from hpcrl.data.datasets import load_dataset, prompt_datasets
from hpcrl.data.entries import CONFIG, read_entries
from hpcrl.data.prompts import count_aside, data_sources
from hpcrl.data.sources import Source, training_sources, validation_sources
from hpcrl.data.tokenize import Recipe, tokenized
from hpcrl.data.tokenizer import chat_template
from hpcrl.data.weight_files import ADAPTER_FILE
from hpcrl.envs.registry import environment_class
from hpcrl.errors import ConfigError, DataError
from hpcrl.launch.family import launch_family
from hpcrl.launch.layouts import all_layouts, usable_layouts
from hpcrl.launch.sharing import check_group
from hpcrl.launch.submit.engine import check_engine, layers_over_nodes, merged_for_engines
from hpcrl.launch.submit.megatron_fields import check_megatron_fields
from hpcrl.launch.submit.models import (
    check_adapters,
    check_layouts,
    check_packing,
    check_routers,
    entries_of,
    is_local,
    rank_problems,
    unchecked_models,
)
from hpcrl.launch.submit.own_code import check_own_code, missing_package, not_tried
from hpcrl.launch.submit.own_rewards import check_own_rewards
from hpcrl.launch.submit.sandbox_images import missing_of_network, missing_of_rows
from hpcrl.launch.submit.teacher import check_precomputed, check_teacher_tokens
from hpcrl.launch.submit.tokenizer import TRIED, bomb, check_prompts, check_tokenizer, has_tokenizer
from hpcrl.launch.submit.truths import check_truths
from hpcrl.launch.submit.uploads import check_uploads, missing_secrets
from hpcrl.launch.submit.vision import check_vision
from hpcrl.network import public_address
from hpcrl.rundir.commit import is_committed
from hpcrl.rundir.layout import step_of
from hpcrl.rundir.other_roots import run_of

_MODEL_PATHS = ("trainer.policy.model.path", "trainer.critic.model.path")
_MOST_SHOWN = 20
_OF_SHAPE = re.compile(r"model_type|tie_word_embeddings|num_\w+|\w+_(size|dim|rank)")


def check_files(config: Config, source_of: Callable[[str], str | None] = lambda _: None) -> list[str]:
    """Check all files of the configuration, except the checkpoint that a first attempt may start from.

    Args:
        source_of: which file and line, or override, sets a path, for errors.

    Returns:
        Warnings: what cannot be known on this machine, and a last step that is not the one that was asked for.
    """
    usable = usable_layouts(all_layouts(config, rank_problems))
    config = config.at(usable[-1].sizes) if usable else config.largest()
    problems, warnings = look(config)
    raise_together([*problems, *check_layouts(config)], source_of, DataError)
    return [*warnings, *merged_for_engines(config), *layers_over_nodes(config), *unchecked_models(config)]


def look(config: Config) -> tuple[list[Problem], list[str]]:
    """Return problems that would end a run, and those that this machine cannot check; layouts of Megatron's ranks are left out.

    Of a dataset the first rows are read, which mostly shows wrong columns, and ground truths of a sample of its rows are scored. Reward
    functions of a user's own are called on the first rows. A .json file is read whole for that; the dataset of an evaluation that never
    happens is not read.
    """
    problems = [
        Problem("python_path", f"no folder {folder}") for folder in config.python_path if not Path(folder).is_dir()
    ]
    of_code, warnings = check_own_code(config)
    of_data, warnings_of_data = _of_datasets(config)
    of_rewards, warnings_of_rewards = ([], []) if of_code or of_data else check_own_rewards(config)
    of_alerts, warnings_of_alerts = _of_alerts(config.trainer.alerts)
    problems += [
        *of_code,
        *of_rewards,
        *of_alerts,
        *of_data,
        *_of_environments(config),
        *_of_models(config),
        *check_engine(config),
    ]
    if not config.slurm.other_environment:
        # where torch is missing too, this is a login node, of which nothing follows for the nodes
        problems += missing_packages(config.trainer) if find_spec("torch") else ()
        problems += check_megatron_fields(config)
    problems += [
        *check_uploads(config),
        *check_group(config.slurm.readable_by),
        *check_packing(config),
        *check_routers(config),
        *check_adapters(config),
        *check_teacher_tokens(config),
        *check_precomputed(config),
        *check_vision(config),
    ]
    of_template, warnings_of_template = _of_chat_template(config)
    problems += of_template
    return problems, [
        *warnings,
        *warnings_of_rewards,
        *warnings_of_alerts,
        *warnings_of_data,
        *warnings_of_template,
        *missing_of_network(config),
        *missing_secrets(config),
    ]


def writes_texts(config: Config) -> bool:
    """Return whether the policy reads and writes texts, with a tokenizer that lies here."""
    return family_of(config).writes_texts and has_tokenizer(config) and not bomb(config.trainer.policy.model.pretrained)


def _of_chat_template(config: Config) -> tuple[list[Problem], list[str]]:
    try:
        chat_template(config.generator.chat_template)
    except ConfigError as error:
        return [_problem(error)], []
    if (
        family_of(config).writes_texts
        and has_tokenizer(config)
        and (why := bomb(config.trainer.policy.model.pretrained))
    ):
        return [Problem("trainer.policy.model.path", why)], []
    return check_tokenizer(config) if writes_texts(config) else ([], [])


def _of_alerts(alerts: AlertsConfig) -> tuple[list[Problem], list[str]]:
    problems, warnings = [], []
    if alerts.webhook_file is not None and not os.access(alerts.webhook_file, os.R_OK):
        problems.append(Problem("trainer.alerts.webhook_file", f"no file {alerts.webhook_file} that can be read"))
    if alerts.command and shutil.which(alerts.command[0]) is None:
        warnings.append(f"trainer.alerts.command: there is no program {alerts.command[0]} on this machine")
    return problems, warnings


def _problem(error: ConfigError) -> Problem:
    path, _, message = str(error).partition(": ")
    return Problem(path, message)


def _of_environments(config: Config) -> Iterator[Problem]:
    name, gym = config.environment.env_class, config.environment.skyrl_gym
    if name and ":" not in name and name not in config.environment.names:
        try:
            environment_class(name)
        except ConfigError as error:
            yield Problem("environment.env_class", str(error))
    if gym.text2sql.db_path and not Path(gym.text2sql.db_path).is_dir():
        yield Problem("environment.skyrl_gym.text2sql.db_path", f"no folder {gym.text2sql.db_path}")
    if gym.search.corpus and not Path(gym.search.corpus).is_file():
        yield Problem("environment.skyrl_gym.search.corpus", f"no file {gym.search.corpus}")
    image, token = gym.agent.container.image, gym.agent.service.token_file
    if image and image.startswith("/") and not Path(image).exists():
        yield Problem("environment.skyrl_gym.agent.container.image", f"no image {image}")
    if gym.agent.service.url:
        with suppress(OSError):  # a name that only the run's nodes know
            if found := public_address(gym.agent.service.url):
                yield Problem(
                    "environment.skyrl_gym.agent.service.url",
                    f"{gym.agent.service.url} is {found}, no address of a private network, where keys would be sent in the clear; use https",
                )
    if token and not os.access(Path(token).expanduser(), os.R_OK):
        yield Problem("environment.skyrl_gym.agent.service.token_file", f"no file {token} that can be read")


def _of_reward_model(section: str, path: str | None, revision: str | None, template: str | None) -> Iterator[Problem]:
    if path is None:
        return
    yield from _of_directory(f"{section}.model", path, f"{section}.revision", revision)
    if template and not Path(template).is_file():
        yield Problem(f"{section}.chat_template", f"no file {template}")
    named = (entries_of(Pretrained(path, revision)) or {}).get("architectures")
    if named and not any(name.endswith(CLASSIFIER) for name in named):
        yield Problem(
            f"{section}.model",
            f"{path} is a {', '.join(named)}; expected a reward model, a sequence classifier of one label (…{CLASSIFIER})",
        )


def _of_models(config: Config) -> Iterator[Problem]:
    service, trainer, distillation = (
        config.environment.remote_reward.service,
        config.trainer,
        config.trainer.distillation,
    )
    yield from _of_reward_model("environment.remote_reward.service", service.model, None, service.chat_template)
    judge = config.environment.reward_model
    yield from _of_reward_model("environment.reward_model", judge.model, judge.revision, judge.chat_template)
    for role, model in (("policy", trainer.policy.model), ("ref", trainer.ref.model), ("critic", trainer.critic.model)):
        place = f"trainer.{role}.model"
        family = family_of(config) if role == "policy" else Family
        yield from _of_directory(f"{place}.path", model.path, f"{place}.revision", model.revision, family)
    yield from _problems_of(partial(launch_family(config).check_model, config))
    if distillation.enable:
        place = "trainer.distillation"
        if distillation.precomputed_logprobs is None:  # else nothing loads it
            yield from _of_directory(
                f"{place}.model_path", distillation.model_path, f"{place}.model_revision", distillation.model_revision
            )
        for source, model in distillation.source_models.items():
            yield from _of_directory(f"{place}.source_models.{source}", model)
    for role, lora in trainer.adapters.items():
        adapter = lora.adapter_path
        if adapter and not Path(adapter, ADAPTER_FILE).is_file():
            yield Problem(
                f"trainer.{role}.model.lora.adapter_path",
                f"{adapter} is no directory of adapters (it has no {ADAPTER_FILE})",
            )


def _problems_of(check: Callable[[], object]) -> Iterator[Problem]:
    """Yield what a check of files raises as DataError, which begins with the setting."""
    try:
        check()
    except DataError as error:
        place, _, message = str(error).partition(": ")
        yield Problem(place, message)


def _of_directory(
    setting: str,
    model: str | None,
    revision_setting: str = "",
    revision: str | None = None,
    family: Family | type[Family] = Family,
) -> Iterator[Problem]:
    if not model or not is_local(model):
        return
    if not Path(model, family.model_file).expanduser().is_file():
        yield Problem(setting, f"{model} is no {family.model_kind} (it has no {family.model_file})")
    if revision is not None:
        yield Problem(
            revision_setting,
            f"{model} is a directory here, which has no revisions; leave it out, or name the model by its id on the hub",
        )


def _of_datasets(config: Config) -> tuple[list[Problem], list[str]]:
    data, problems, warnings = config.data, list[Problem](), list[str]()
    offline = config.trainer.offline
    if offline:
        problems, warnings = _of_rows(config)
    for name, source, kinds in (
        (name, source, kinds) for name, those, kinds in prompt_datasets(config) for source in those
    ):
        path = source.location
        if not source.exists():
            problems.append(Problem(name, f"no file {path}"))
            continue
        try:
            rows = load_dataset(
                [source], kinds, data, config.environment, config.generator.max_turns, first=TRIED, own=True
            )
            problems += check_prompts(config, name, path, rows) if writes_texts(config) else ()
            warnings += _other_environment(name, path, rows[0].env_class, config.environment)
            changed = _changed(source)
            of_truths, warnings_of_truths = check_truths(name, source, kinds, config, changed)
            problems += of_truths
            warnings += warnings_of_truths
            warnings += missing_of_rows(name, source, kinds, config, changed)
        except (DataError, ModuleNotFoundError) as error:  # of parquet: pyarrow
            if package := missing_package(error):
                warnings.append(f"{name}: the first row of {path} {not_tried(package)}")
            else:
                problems.append(Problem(name, str(error).removeprefix(f"{name}=")))
    if not problems:
        try:
            warnings += _of_the_end(config)
        except DataError as error:
            problems.append(Problem("data.train_data", str(error).removeprefix("data.train_data ")))
    if not problems and not offline:
        problems += _of_teachers(config)
    return problems, warnings


def _other_environment(name: str, path: str, of_row: str, environment: EnvironmentConfig) -> Iterator[str]:
    configured = environment.env_class
    if configured is not None and of_row != environment.path_of(configured):
        yield (
            f"{name}: the first row of {path} names {of_row} in its column env_class, which environment.env_class = {configured} does not "
            "replace: that is for rows without one"
        )


def _of_teachers(config: Config) -> Iterator[Problem]:
    """Require rows of each teacher, in all files: with a typo in its name another teacher would judge them."""
    distillation = config.trainer.distillation
    if not (distillation.enable and distillation.source_models):
        return
    try:
        found = data_sources(training_sources(config.data))
    except DataError as error:
        yield Problem("data.train_data", str(error))
        return
    for name in sorted(distillation.source_models.keys() - found):
        yield Problem(
            f"trainer.distillation.source_models.{name}",
            f"expected a data_source of rows of data.train_data: {', '.join(sorted(found)[:_MOST_SHOWN])}",
        )


def _of_rows(config: Config) -> tuple[list[Problem], list[str]]:
    """Check the first row of each dataset whose rows are trained, and for KTO its prompts. What is on the hub is downloaded here, for nodes without network."""
    problems, warnings, recipe, read = list[Problem](), list[str](), Recipe.of(config), list[str]()
    named = [("data.train_data", source) for source in training_sources(config.data)]
    if config.trainer.eval_interval > 0:
        named += [("data.val_data", source) for source in validation_sources(config.data, config.data.val_data)]
    for name, source in named:
        try:
            next(tokenized(source, recipe))
        except (DataError, ModuleNotFoundError) as error:
            if package := missing_package(error):
                warnings.append(f"{name}: the first row of {source.location} {not_tried(package)}")
            else:
                problems.append(Problem(name, str(error)))
        except ConfigError as error:
            problems.append(_problem(error))
        else:
            read.append(name)
    whole = read.count("data.train_data") == len(training_sources(config.data))
    if whole and "kto" in config.trainer.dpo.loss_type and config.trainer.unpaired:
        problems += _of_one_prompt(config, recipe)
    return problems, warnings


def _of_one_prompt(config: Config, recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem where all rows of all datasets have one prompt, behind which KTO could put no other answer."""
    try:
        rows = (row for source in training_sources(config.data) for row in tokenized(source, recipe))
        prompts = (answer.token_ids[: answer.mask.index(True)] for row in rows for answer in row if any(answer.mask))
        first = next(prompts, None)
        alike = all(prompt == first for prompt in prompts)
    except DataError as error:
        yield Problem("data.train_data", str(error))
        return
    if alike:
        yield Problem(
            "trainer.dpo.loss_type",
            "kto puts answers behind other prompts, and all rows of data.train_data have one prompt; add rows, or use "
            '"apo_zero_unpaired"',
        )


def _of_the_end(config: Config) -> Iterator[str]:
    """Yield a line if the data end before the last step that was asked for."""
    data, trainer, batch = config.data, config.trainer, config.trainer.train_batch_size
    prompts = _training_rows(config)
    if prompts is None:
        return
    last, asked = trainer.total_steps(prompts, data.drop_last), trainer.max_steps
    if asked is not None and last < asked:
        epoch = batch * steps_per_epoch(prompts, batch) if data.drop_last else prompts
        yield (
            f"trainer.max_steps: {asked} steps are asked for, and the data end at step {last}: {prompts:,} prompts are {epoch // batch} steps of "
            f"{batch}, and trainer.epochs is {trainer.epochs}; raise it to {math.ceil(asked * batch / epoch)}"
        )


def _training_rows(config: Config) -> int | None:
    """Return the prompts or rows of an epoch, too long ones included; None: that is not quickly known."""
    data = config.data
    counts = [_count(source, _changed(source)) for source in training_sources(data)]
    if None in counts:
        return None
    sizes = [count or 0 for count in counts]
    left = 0 if data.test_size is None else count_aside(sum(sizes), data.test_size)
    for at, size in enumerate(sizes):
        sizes[at] -= min(left, size)
        left -= size - sizes[at]
    return sum(round(weight * size) for weight, size in zip(data.weights or [1.0] * len(sizes), sizes, strict=True))


def _changed(source: Source) -> int:
    return max(os.stat(path).st_mtime_ns for path in source.files()) if source.is_here() else 0


@lru_cache(maxsize=64)
def _count(source: Source, changed: int) -> int | None:  # noqa: ARG001 - elements of a sweep mostly have the same files
    return source.count()


def check_checkpoint(config: Config) -> list[str]:
    """Compare a run that starts from another run's checkpoint with that run.

    Returns:
        Warnings: what differs and matters, but can be; or that the two cannot be compared.

    Raises:
        DataError: there is no such checkpoint.
        ConfigError: lists every difference with which the checkpoint cannot be loaded.
    """
    path = config.trainer.resume_path
    if config.trainer.resume_mode != "from_path" or path is None:
        return []
    if not (is_committed(Path(path)) and step_of(Path(path))):
        raise DataError(
            f"trainer.resume_path: {path} is no committed checkpoint; expected <run>/checkpoints/sNNNNNN with a COMMIT file"
        )
    saved_by = run_of(Path(path))
    try:
        saved = Config.from_toml([saved_by.config])
    except ConfigError as error:
        return [f"trainer.resume_path: the run that saved {path} cannot be compared with this one: {error}"]
    found = [_same_shape(change) for change in changes_from_path(saved, config)]
    refused, others = (
        [f"{saved_by.name} -> this run: {change}" for change in found if (change.kind == "refused") == which]
        for which in (True, False)
    )
    if refused:
        raise ConfigError(
            "\n".join(
                [
                    *refused,
                    *others,
                    f"trainer.resume_path: {path} cannot be loaded by this run; set what is refused alike",
                ]
            )
        )
    return others


def _same_shape(change: Change) -> Change:
    """Let another model directory pass if it holds a model of the same shape, such as an export of the run that saved."""
    if change.difference.path not in _MODEL_PATHS:
        return change
    left, right = (_shape(value) for value in (change.difference.left, change.difference.right))
    if left is None or right is None:
        if None in (change.difference.left, change.difference.right):
            return change
        return Change(change.difference, "warning", "hpcrl cannot see whether both have the same shape")
    other = sorted(name for name in left.keys() & right.keys() if left[name] != right[name])
    if other:
        return Change(change.difference, "refused", f"config.json differs in {', '.join(other)}")
    return Change(
        change.difference, "warning", "same shape; weights come from the checkpoint, the rest from the new path"
    )


def _shape(path: str | None) -> Mapping[str, Any] | None:
    """Return the entries of a model's config.json that its weights depend on, or None where it cannot be read here."""
    try:
        content = read_entries(Path(path or "") / CONFIG)
    except OSError:
        return None
    return {name: value for name, value in content.items() if _OF_SHAPE.fullmatch(name)}
