"""Estimates the disk space of a run's checkpoints, weights and exports, from the headers of its models' files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.sections.model import LoraConfig, Pretrained
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.data.entries import CONFIG, read_entries
from hpcrl.errors import DataError
from hpcrl.rundir.checkpoints import NEVER_DELETED
from hpcrl.rundir.commit import committed, parse_json
from hpcrl.rundir.evaluations import MOST_OPEN
from hpcrl.rundir.layout import Run, position_of, version_of

_ADAM = 3  # the weights and two moments, in the same number type
COPIES = 2
"""Versions in a node's directory of copies: one that a replica still loads, and the next."""
_HEADER_LIMIT = 100 << 20  # as the safetensors library has it


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a run will write to a directory.

    Attributes:
        least: bytes without which the run fails.
        most: bytes that it adds until it has all files that it keeps.
        what: description of the files behind `least`.
        required: less than the least is an error, not a warning.
    """

    least: int
    most: int
    what: str
    required: bool = True

    def __add__(self, other: DiskNeed) -> DiskNeed:
        """Return the need of both on the filesystem that they share."""
        return DiskNeed(self.least + other.least, self.most + other.most, f"{other.what} and {self.what}")


@dataclass(frozen=True)
class Sizes:
    """Approximate bytes of files of a run.

    Attributes:
        weights: one version of the engines' weights; 0 without engines.
        checkpoint: one checkpoint.
        export: one export.
    """

    weights: int
    checkpoint: int
    export: int

    @classmethod
    def of(cls, config: Config, folder_of: Callable[[Pretrained], Path | None]) -> Sizes | None:
        """Return the sizes, or None where a model is not on this machine, or its files are no safetensors.

        Args:
            folder_of: a model -> its directory; None: it is not here.
        """
        trainer = config.trainer
        trained = {role: model for role, model in trainer.models.items() if role != "ref"}
        headers = {role: _headers(folder_of(model)) for role, model in trained.items()}
        if not all(headers.values()):
            return None
        files = {role: {name: entry["shape"] for name, entry in header.items()} for role, header in headers.items()}
        counts = {role: _saved_parameters(shapes, trainer.adapters.get(role)) for role, shapes in files.items()}
        weight = 4 if config.generator.inference_engine.model_dtype == "float32" else 2
        whole = _saved_parameters(files["policy"], None)
        published = counts["policy"] if config.loads_adapters else whole
        return cls(
            weight * published if config.has_engines else 0,
            sum(_saved(trainer, role) * count for role, count in counts.items()),
            _width(folder_of(trained["policy"]), headers["policy"]) * whole,
        )


def _saved(trainer: TrainerConfig, role: str) -> int:
    if trainer.strategy == "megatron":
        return 4 * _ADAM + (2 if trainer.policy.megatron_config.dtype != "fp32" else 0)
    sharding = trainer.critic.fsdp_config if role == "critic" else trainer.policy.fsdp_config
    return _ADAM * (4 if sharding.mixed_precision.master_dtype == "fp32" else 2)


def disk_needs(run: Run, config: Config, sizes: Sizes | None) -> dict[str, DiskNeed]:
    """Return the disk needs of a run, by the directories of hpcrl.launch.doctor.node.facts; empty where they are unknown.

    Folders on the same filesystem are counted together, at the first of them.
    """
    if sizes is None:
        return {}
    trainer = config.trainer
    checkpoint = sizes.checkpoint if trainer.saves_checkpoints else 0
    kept, there = max(trainer.max_ckpts_to_keep, NEVER_DELETED), len(committed(run.checkpoints, position_of))
    evaluated = _evaluated(config)
    versions = trainer.fully_async.kept_versions + evaluated - len(committed(run.weights, version_of))
    export = sizes.export if trainer.hf_save_interval > 0 else 0
    written = {
        "root": (run.path, DiskNeed(sizes.weights, sizes.weights * max(1, versions), "the weights for the engines")),
        "checkpoints": (run.checkpoints, DiskNeed(checkpoint, checkpoint * max(1, kept + 1 - there), "a checkpoint")),
        "exports": (run.exports, DiskNeed(export, export, "an export")),
    }
    found, first = dict[str, DiskNeed](), dict[int, str]()
    for name, (folder, need) in written.items():
        if need.most == 0 and name != "root":
            continue
        place = first.setdefault((folder if folder.is_dir() else run.path).stat().st_dev, name)
        found[place] = found[place] + need if place in found else need
    return found | {"copies": DiskNeed(0, COPIES * sizes.weights, f"{COPIES} versions of the weights")}


def _evaluated(config: Config) -> int:
    """Return how many versions stay at most for evaluations that are not over; of a job's as many as trainer.max_steps has."""
    trainer = config.trainer
    if trainer.eval_interval <= 0:
        return 0
    if config.slurm.evaluation.when == "never":
        return MOST_OPEN
    return max(MOST_OPEN, -(-(trainer.max_steps or 0) // trainer.eval_interval) + 1)


def _saved_parameters(shapes: dict[str, list[int]], lora: LoraConfig | None) -> int:
    """Return the number of parameters in a model's checkpoint. With LoRA these are adapters of all its matrices, an upper bound, and the
    modules that are trained whole."""
    if lora is None:
        return sum(map(math.prod, shapes.values()))
    whole = [shape for name, shape in shapes.items() if any(part in name for part in lora.modules_to_save or ())]
    return lora.largest_rank * sum(sum(shape) for shape in shapes.values() if len(shape) == 2) + sum(
        map(math.prod, whole)
    )


def _width(folder: Path | None, header: dict[str, dict[str, Any]]) -> int:
    """Return the bytes of a parameter in an export, which has the number type of config.json, else that of the files."""
    try:
        entries = read_entries(folder / CONFIG) if folder else {}
    except (OSError, DataError):
        entries = {}
    entries = (entries.get("text_config") or {}) | entries
    named = entries.get("dtype") or entries.get("torch_dtype")
    stored = {entry["dtype"] for entry in header.values()}
    return 2 if named in ("bfloat16", "float16") or (named is None and stored in ({"BF16"}, {"F16"})) else 4


def _headers(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Return shape and number type of a model's tensors, by the headers of its safetensors files; none where it has no such files, or they cannot be read."""
    found: dict[str, dict[str, Any]] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")) if folder else []:
            found |= _listed(path)
    except (OSError, ValueError):
        return {}
    return found


def _listed(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors of a safetensors file: eight bytes, the length of a JSON header of its tensors, then that header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise ValueError(f"{path} is no safetensors file")
        header = parse_json(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
