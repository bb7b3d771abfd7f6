"""Checksums of files outside the run directory that each attempt reads again: datasets, chat templates, local models, files of
environments.

inputs.json is written where the first attempt after `hpcrl submit` or `hpcrl resume` begins; each later attempt compares with it:

    {"/data/math/train.parquet": {"setting": "data.train_data", "digest": "71c2…", "status": [5120, …]}, …, "blake2b": "413b…"}

`status` is size, times of change and inode: a file that has the same ones is not read again by an attempt, `hpcrl verify` reads all. Of a
dataset of the hub, the name is that in the repository, so another commit with the same files is no change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.difference import flat
from hpcrl.config.family import Family, families
from hpcrl.data.sources import training_sources, validation_sources
from hpcrl.errors import DataError
from hpcrl.rundir.checksums import refusal
from hpcrl.rundir.commit import checksum, naming, read_bytes, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import parse_record, with_checksum

DATASETS = "data.train_data", "data.val_data", "data.val_prompts"
MODELS = (
    *(f"trainer.{role}.model.path" for role in ("policy", "ref", "critic")),
    *(f"trainer.{role}.model.lora.adapter_path" for role in ("policy", "critic")),
    "trainer.distillation.model_path",
    "trainer.distillation.source_models",
    "environment.reward_model.model",
    "environment.remote_reward.service.model",
)
"""Directories of models and adapters, or names on the hub."""
FILES = (
    "generator.chat_template.name_or_path",
    "environment.reward_model.chat_template",
    "environment.remote_reward.service.chat_template",
    "environment.skyrl_gym.text2sql.db_path",
    "environment.skyrl_gym.search.corpus",
    "environment.skyrl_gym.agent.command",
    "trainer.distillation.precomputed_logprobs",
)
"""Files, and directories of them."""
_OF_MODELS = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py", ".tiktoken")
_SNAPSHOT = re.compile(r".*/datasets--([^/]+?)--([^/]+)/snapshots/[^/]+/")
_AT_ONCE = 8  # files that are read at the same time
_SHOWN_S = 5.0
_WHOLE, _SAMPLES, _SAMPLE = 64 << 20, 64, 64 << 10


@dataclass(frozen=True)
class Input:
    """A file that a setting names, itself or as one of a directory or a dataset.

    Attributes:
        sampled: its digest is of parts of it where it is large, as weights are: training changes all of them.
    """

    setting: str
    path: Path
    sampled: bool

    def status(self) -> list[int]:
        found = self.path.stat()
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]

    def digest(self) -> str:
        """Return the BLAKE2b-128 digest of the file, or of its size and `_SAMPLES` parts at equal distances, from its beginning to its end."""
        size = self.path.stat().st_size
        if not self.sampled or size <= _WHOLE:
            return checksum(self.path)
        digest = hashlib.blake2b(str(size).encode(), digest_size=16)
        with naming(self.path), self.path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek((size - _SAMPLE) * part // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
        return digest.hexdigest()


def inputs_of(config: Config) -> dict[str, Input]:
    """Return the files that an attempt would read now, by the name under which they are noted; what is missing is left out."""
    found = [*_of_datasets(config), *_of_settings(config)]
    return {_SNAPSHOT.sub(r"\1/\2/", str(each.path)): each for each in found}


def _of_datasets(config: Config) -> Iterator[Input]:
    data, evaluates = config.data, config.trainer.eval_interval > 0
    sources = {"data.train_data": training_sources(data)}
    if evaluates:
        sources["data.val_data"] = validation_sources(data, data.val_data)
        sources["data.val_prompts"] = validation_sources(data, data.val_prompts)
    for setting, those in sources.items():
        for source in filter(lambda one: one.ends, those):
            # a machine without huggingface_hub does not see what is on the hub
            with suppress(DataError, ModuleNotFoundError):
                yield from (Input(setting, path.absolute(), False) for path in source.files())


def _of_settings(config: Config) -> Iterator[Input]:
    for setting, value in flat(config.to_dict()):
        named = setting if setting in MODELS or setting in FILES else setting.rpartition(".")[0]
        if named not in (*MODELS, *FILES):
            continue
        for text in value if isinstance(value, list) else [value]:
            path = Path(text or "").expanduser()
            if not path.is_absolute():  # a name on the hub, of a template or of a program
                continue
            if named in MODELS:
                yield from (Input(setting, each, True) for each in _files_of_model(path))
            else:
                yield from (Input(setting, each, named.endswith("precomputed_logprobs")) for each in _files(path))


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path] * path.is_file()


def _files_of_model(folder: Path) -> list[Path]:
    """Return the loaded files of a model's directory; a model of several has one directory for each."""
    below = folder.glob("*/*") if any((folder / name).is_file() for name in _indexes()) else ()
    found = {*folder.glob("*"), *below, *folder.glob("additional_chat_templates/*")}
    return sorted(path for path in found if path.suffix in _OF_MODELS and path.name[0] != "." and path.is_file())


def _indexes() -> set[str]:
    return {family.model_file for family in families()} - {Family.model_file}


def note_inputs(run: Run, config: Config, progress: Callable[[], object]) -> None:
    """Note the files that the attempts of a run read, as they are now."""
    inputs = inputs_of(config)
    # before they are read, so that a change meanwhile is found later
    status = {name: each.status() for name, each in inputs.items()}
    digests = _digests(inputs, progress)
    noted = {
        name: {"setting": each.setting, "digest": digests[name], "status": status[name]}
        for name, each in inputs.items()
    }
    write_text(run.inputs, with_checksum({"files": noted})[0])


def _digests(inputs: dict[str, Input], progress: Callable[[], object]) -> dict[str, str]:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = {name: threads.submit(each.digest) for name, each in inputs.items()}
        while wait(found.values(), _SHOWN_S).not_done:
            progress()
    try:
        return {name: each.result() for name, each in found.items()}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def changed_inputs(
    run: Run, config: Config, progress: Callable[[], object] = lambda: None, *, reread: bool = False
) -> list[str]:
    """Return the changes of the files since they were noted, a sentence each; empty where none was noted yet.

    Where rows of datasets are trained, the run has their tokens, and a dataset that is gone is no change.

    Args:
        progress: called now and then while files are read.
        reread: read those too whose status is the same.
    """
    if (content := read_bytes(run.inputs)) is None:
        return []
    try:
        noted: dict[str, Any] = parse_record(content, required=True)[0]["files"]
    except (ValueError, KeyError, TypeError):
        return [f"{run.inputs.name} is damaged"]
    now = inputs_of(config)
    read = {
        name: each for name, each in now.items() if name in noted and (reread or each.status() != noted[name]["status"])
    }
    digests = _digests(read, progress)
    gone = [name for name in noted.keys() - now.keys() if not _is_unseen(name, now)]
    kept = DATASETS[:2] if config.trainer.offline else ()
    became = {name: "was changed" for name, digest in digests.items() if digest != noted[name]["digest"]}
    became |= {name: "is missing" for name in gone if noted[name]["setting"] not in kept}
    became |= dict.fromkeys(now.keys() - noted.keys(), "is new")
    settings = {name: each["setting"] for name, each in noted.items()} | {
        name: each.setting for name, each in now.items()
    }
    both = [name for name in noted if name in now], [name for name in now if name in noted]
    moved = [] if both[0] == both[1] else [f"the order of the files, from {_first_moved(*both)} on, was changed"]
    return [*(f"{name} ({settings[name]}) {became[name]}" for name in sorted(became)), *moved]


def _first_moved(before: Sequence[str], now: Sequence[str]) -> str:
    return next(name for name, other in zip(now, before, strict=True) if name != other)


def _is_unseen(name: str, now: Iterable[str]) -> bool:
    """Return whether a file is of a dataset of the hub that is not to be found on this machine."""
    repository = "/".join(name.split("/")[:2])
    return not name.startswith("/") and not any(other.startswith(f"{repository}/") for other in now)


def require_same_inputs(run: Run, config: Config, progress: Callable[[], object] = lambda: None) -> None:
    """Let an attempt begin only with the datasets, templates and models of the one before; note them where it is the first one.

    Raises:
        DataError: one of the files is another.
    """
    if changed := changed_inputs(run, config, progress):
        raise refusal(run, changed)
    if read_bytes(run.inputs) is None:
        note_inputs(run, config, progress)
