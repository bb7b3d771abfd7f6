"""Estimates the bytes of a run directory, by the shapes in the headers of its models' files; nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config import Config
from hpcrl.launch.doctor.disk_space import COPIES, Sizes
from hpcrl.rundir.checkpoints import NEVER_DELETED, Retention
from hpcrl.rundir.evaluations import MOST_OPEN
from hpcrl.units import readable_size


def describe_disk(config: Config, sizes: Sizes | None) -> Iterator[str]:
    """Yield lines about checkpoints and published weights, for people.

    Args:
        sizes: bytes of its files; None: not known.
    """
    trainer = config.trainer
    keep = Retention.of(trainer) if trainer.saves_checkpoints else None
    if sizes is None:
        yield f"disk: not known, since not all models have safetensors files on this machine; {_kept(keep)}"
        return
    size, each = sizes.checkpoint, sizes.weights
    yield f"disk: a checkpoint has about {readable_size(size)}; {_kept(keep)}{_at_most(keep, size)}"
    if config.has_engines:
        what, versions = "adapters" if config.loads_adapters else "weights", trainer.fully_async.kept_versions
        yield (
            f"  published {what} have {readable_size(each)}: the newest {versions} versions stay, with the one on its way "
            f"{readable_size(each * (versions + 1))}"
        )
        if trainer.eval_interval > 0:
            by_job = config.slurm.evaluation.when != "never"
            most = "all that their job has yet to make" if by_job else f"{MOST_OPEN} at most"
            yield f"  and those of evaluations that are not over: {most}"
        engine = config.generator.inference_engine
        if engine.full_weights_interval > 1:
            yield f"  every {engine.full_weights_interval}th version is whole, and stays as long as versions with changes of it"
        if engine.full_weights_interval > 1 or engine.weight_sync_backend != "filesystem":
            yield f"  the trainer's nodes keep a version in host memory: {readable_size(each)} on all of them together, for a moment twice that"
    if trainer.hf_save_interval > 0:
        yield f"  an export has {readable_size(sizes.export)}, and none is deleted"
    if trainer.keep_when_done != "all":
        yield f"  once the run is done, what trainer.keep_when_done names stays: {trainer.keep_when_done}"
    if sizes.weights and (place := config.generator.inference_engine.weight_copy_dir) and not config.loads_adapters:
        yield f"  copies of them take {readable_size(each)} of {place} on each node with replicas, and for a while {readable_size(each * COPIES)}"


def _kept(keep: Retention | None) -> str:
    if keep is None:
        return "none is saved"
    if keep.newest < 0:
        return "all are kept (trainer.max_ckpts_to_keep)"
    more = f", and each of a multiple of {keep.every} steps" if keep.every else ""
    best = f", and the best by {keep.metric}" if keep.metric else ""
    return f"the newest {_newest(keep)} stay (trainer.max_ckpts_to_keep){more}{best}"


def _at_most(keep: Retention | None, size: int) -> str:
    if keep is None or keep.newest < 0 or keep.every:
        return ""
    at_once = _newest(keep) + bool(keep.metric) + 1
    return f": with the one on its way {readable_size(size * at_once)}"


def _newest(keep: Retention) -> int:
    return max(keep.newest, NEVER_DELETED)
