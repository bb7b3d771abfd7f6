"""What a run keeps in its directory, in bytes, by the shapes in the headers of its models' files; nothing is loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.derive import model_paths
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.planning.memory import BYTES
from hpcrl.rundir.checkpoints import NEVER_DELETED
from hpcrl.units import readable_size

_MOMENTS = 2  # of Adam, in the type of the master weights


def describe_disk(config: Config, folder_of: Callable[[str], Path | None]) -> Iterator[str]:
    """Yield lines about checkpoints and published weights, for people.

    Args:
        folder_of: the directory of a model, None where it is not on this machine.
    """
    trainer, counts = config.trainer, dict[str, int]()
    for role, path in model_paths(trainer).items():
        count = _parameters(folder_of(path))
        if count is None and role != "ref":
            yield f"disk: not known, since {path} has no safetensors files on this machine; {_kept(trainer)}"
            return
        counts[role] = count or 0
    size = sum(_saved(trainer, role) * count for role, count in counts.items() if role != "ref")
    yield f"disk: a checkpoint has about {readable_size(size)}; {_kept(trainer)}{_at_most(trainer, size)}"
    dtype = {"float32": 4}.get(config.generator.inference_engine.model_dtype, 2)
    versions, each = trainer.fully_async.max_staleness_steps + 2, dtype * counts["policy"]
    exports = "; exports are never deleted" if trainer.hf_save_interval > 0 else ""
    yield (
        f"  published weights and exports have {readable_size(each)} each: the newest {versions} versions stay, with the one on its way "
        f"{readable_size(each * (versions + 1))}{exports}"
    )


def _kept(trainer: TrainerConfig) -> str:
    if trainer.ckpt_interval <= 0 and trainer.ckpt_interval_epochs is None:
        return "none is saved"
    if trainer.max_ckpts_to_keep < 0:
        return "all are kept (trainer.max_ckpts_to_keep)"
    more = f", and each of a multiple of {trainer.ckpt_keep_every} steps" if trainer.ckpt_keep_every else ""
    best = f", and the best by {trainer.ckpt_keep_best}" if trainer.ckpt_keep_best else ""
    return f"the newest {_newest(trainer)} stay (trainer.max_ckpts_to_keep){more}{best}"


def _at_most(trainer: TrainerConfig, size: int) -> str:
    unbounded = trainer.max_ckpts_to_keep < 0 or trainer.ckpt_keep_every
    if unbounded or (trainer.ckpt_interval <= 0 and trainer.ckpt_interval_epochs is None):
        return ""
    at_once = _newest(trainer) + bool(trainer.ckpt_keep_best) + 1
    return f": with the one on its way {readable_size(size * at_once)}"


def _newest(trainer: TrainerConfig) -> int:
    return max(trainer.max_ckpts_to_keep, NEVER_DELETED)


def _saved(trainer: TrainerConfig, role: str) -> int:
    """Return the bytes that a checkpoint has of a parameter: the weights, and the master weights and moments that training has of it."""
    if trainer.strategy == "megatron":
        bf16 = trainer.policy.megatron_config.dtype != "fp32"
        return BYTES["fp32"] * (1 + _MOMENTS) + (BYTES["bf16"] if bf16 else 0)
    sharding = trainer.critic.fsdp_config if role == "critic" else trainer.policy.fsdp_config
    return BYTES[sharding.mixed_precision.master_dtype] * (1 + _MOMENTS)


def _parameters(folder: Path | None) -> int | None:
    """Return the numbers in a model's files; None: it has none of this kind here."""
    files = sorted(folder.glob("model*.safetensors")) if folder else []
    try:
        return sum(map(_numbers, files)) or None
    except (OSError, ValueError, struct.error):
        return None


def _numbers(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, path.stat().st_size)))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
