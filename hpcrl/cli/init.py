"""`hpcrl init`: write an experiment to change, with rows and a reward of its own."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import NamedTuple

from hpcrl.text import printable

_TEMPLATES = Path(__file__).with_name("experiments")
_SETTINGS = "experiment.toml"
_MODEL = "model"
_MADE = ("train.jsonl", "validation.jsonl")  # by make_rows.py


class _Kind(NamedTuple):
    """Files of an experiment, with their templates.

    Attributes:
        lr: learning rate of the tiny model.
        lr_of_others: learning rate of a model that --model names.
    """

    title: str
    files: dict[str, str]
    lr: str
    lr_of_others: str


_ROWS = {"make_rows.py": "make_rows.py"}
_KINDS = {
    "rl": _Kind("GRPO with a reward function", {**_ROWS, "rewards.py": "rl/rewards.py"}, "5e-4", "1e-5"),
    "sft": _Kind("supervised fine-tuning", _ROWS, "3e-3", "2e-5"),
    "dpo": _Kind("DPO on pairs", {"make_rows.py": "dpo/make_rows.py"}, "1e-3", "1e-5"),
    "environment": _Kind(
        "GRPO in an environment of several turns",
        {**_ROWS, "environment.py": "environment/environment.py"},
        "5e-4",
        "1e-5",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="made if it is missing; no file in it is overwritten")
    kinds = "; ".join(f"{name}: {kind.title}" for name, kind in _KINDS.items())
    parser.add_argument("--kind", choices=list(_KINDS), default="rl", help=f"{kinds} (default: rl)")
    parser.add_argument(
        "--model",
        metavar="PATH|NAME",
        help="a model in Hugging Face format, or its name on the hub (default: a copy of the quickstart's tiny model)",
    )
    parser.epilog = "example: hpcrl init sums --model Qwen/Qwen2.5-0.5B-Instruct"
    parser.set_defaults(action=_init)


def _init(arguments: argparse.Namespace) -> int:
    from hpcrl.config.difference import value_as_toml
    from hpcrl.convert.conversion import directory_name
    from hpcrl.launch.bench.models import tiny_model

    folder, kind, model = arguments.folder, _KINDS[arguments.kind], arguments.model
    values = {
        "name": value_as_toml((directory_name(os.path.basename(os.path.realpath(folder))) or "mine")[:128]),
        "model": value_as_toml(f"./{_MODEL}" if model is None else _location(model, folder)),
        "lr": kind.lr if model is None else kind.lr_of_others,
    }
    settings = Template((_TEMPLATES / arguments.kind / _SETTINGS).read_text(encoding="utf-8")).substitute(values)
    copied = {name: _TEMPLATES / template for name, template in kind.files.items()}
    if model is None:
        copied[_MODEL] = tiny_model()
    _write(folder, copied, settings)
    for name in [*copied, _SETTINGS]:
        print(printable(f"wrote {folder / name}"))
    print("next:")
    for words in (["python", folder / "make_rows.py"], ["hpcrl", "submit", folder / _SETTINGS, "--local", "--follow"]):
        print(printable(f"  {shlex.join(map(str, words))}"))
    return 0


def _location(model: str, folder: Path) -> str:
    """Return how a configuration in `folder` names a model.

    Raises:
        DataError: it is no folder with a model, and no name on a hub.
    """
    from hpcrl.data.entries import CONFIG
    from hpcrl.errors import DataError

    path = Path(model).expanduser()
    if (path / CONFIG).is_file():
        if path.is_absolute():
            return model
        relative = os.path.relpath(path, os.path.realpath(folder))
        return relative if relative.startswith("../") else f"./{relative}"
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise DataError(f"--model: {model} has no {CONFIG}; expected a folder with a model, or owner/name on the hub")
    return model


def _write(folder: Path, copied: dict[str, Path], settings: str) -> None:
    """Write all files or none; the settings are put last, so that a write that was killed leaves no experiment.

    Raises:
        ConfigError: a file of that name is there already.
        SubmitError: the filesystem refuses.
    """
    from hpcrl.errors import ConfigError, SubmitError

    there = [name for name in [*copied, _SETTINGS, *_MADE] if os.path.lexists(folder / name)]
    if there:
        raise ConfigError(f"{folder} has {', '.join(there)} already; nothing was written; name another folder")
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".init-", dir=folder) as staged:
            for name, source in copied.items():
                _copy(source, Path(staged, name))
            Path(staged, _SETTINGS).write_text(settings, encoding="utf-8")
            for name in [*copied, _SETTINGS]:
                os.rename(Path(staged, name), folder / name)
    except OSError as error:
        if new:
            with suppress(OSError):
                folder.rmdir()
        raise SubmitError(f"{folder}: {error.strerror}; nothing was written; name another folder") from None


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a flat folder without its modes, which may forbid changes."""
    if source.is_dir():
        target.mkdir()
        for file in source.iterdir():
            shutil.copyfile(file, target / file.name)
    else:
        shutil.copyfile(source, target)
