"""What can be known to fail before anything is queued: files that a run needs, models that its ranks cannot share, and the checkpoint that
it starts from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.resume_changes import Change, changes_from_path
from hpcrl.data.chat import chat_template
from hpcrl.data.datasets import load_dataset
from hpcrl.envs.registry import environment_class
from hpcrl.errors import ConfigError, DataError
from hpcrl.launch.submit.models import MODEL_FILE, check_layouts, folder_of, is_local
from hpcrl.rundir.commit import is_committed
from hpcrl.rundir.layout import Run, step_of
from hpcrl.types import Kind

_MODEL_PATHS = ("trainer.policy.model.path", "trainer.critic.model.path")
_OF_SHAPE = re.compile(r"model_type|tie_word_embeddings|num_\w+|\w+_(size|dim|rank)")


def check_files(config: Config) -> None:
    """Look at every file that the configuration names, but for the checkpoint that a first attempt may start from.

    A model that is here must be one that Megatron's ranks can share.

    Of a dataset the first row is looked at, which mostly tells whether its columns are those that are wanted. A .json file is read
    whole for that, and one of an evaluation that never happens not at all.

    Raises:
        DataError: lists everything that is missing, or cannot be shared.
    """
    problems = []
    for folder in config.python_path:
        if not Path(folder).is_dir():
            problems.append(f"python_path: no folder {folder}")
    problems += _of_datasets(config)
    try:
        chat_template(config.generator.chat_template)
    except ConfigError as error:
        problems.append(str(error))
    name = config.environment.env_class
    if name and ":" not in name:  # one's own is imported by the job: here its packages may be missing
        try:
            environment_class(name)
        except ConfigError as error:
            problems.append(f"environment.env_class: {error}")
    gym = config.environment.skyrl_gym
    if gym.text2sql.db_path and not Path(gym.text2sql.db_path).is_dir():
        problems.append(f"environment.skyrl_gym.text2sql.db_path: no folder {gym.text2sql.db_path}")
    if gym.search.corpus and not Path(gym.search.corpus).is_file():
        problems.append(f"environment.skyrl_gym.search.corpus: no file {gym.search.corpus}")
    models = {
        "trainer.policy.model.path": config.trainer.policy.model.path,
        "trainer.ref.model.path": config.trainer.ref.model.path,
        "trainer.critic.model.path": config.trainer.critic.model.path,
    }
    for name, path in models.items():
        if path and is_local(path) and not folder_of(path):
            problems.append(f"{name}: {path} is no model directory (it has no {MODEL_FILE})")
    problems += check_layouts(config)
    if problems:
        raise DataError("\n".join(problems))


def _of_datasets(config: Config) -> Iterator[str]:
    training: tuple[Kind, ...] = ("train",) if config.data.test_size is None else ("train", "eval")
    readable = (".json", ".jsonl", *([".parquet"] if find_spec("pyarrow") else []))
    sources: tuple[tuple[str, list[str], tuple[Kind, ...]], ...] = (
        ("data.train_data", config.data.train_data, training),
        ("data.val_data", config.data.val_data if config.trainer.eval_interval > 0 else [], ("eval",)),
    )
    for name, paths, kinds in sources:
        for path in paths:
            if not Path(path).expanduser().is_file():
                yield f"{name}: no file {path}"
            elif path.endswith(readable):
                try:
                    load_dataset([path], kinds, config.data, config.environment, config.generator.max_turns, first=1)
                except DataError as error:
                    yield f"{name}: {error}"


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
    saved_by = Run(Path(path).parent.parent)
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
        content = json.loads((Path(path or "") / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return {name: value for name, value in content.items() if _OF_SHAPE.fullmatch(name)}
