"""The policy as a model that others load: weights/v<k> for the inference engines, exports/s<k> for people.

Both are the same files, safetensors under Hugging Face names; an export adds configuration and tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.data.chat import load_tokenizer
from hpcrl.errors import HpcrlError
from hpcrl.rundir.commit import committed, committed_by, committed_directory, discard, is_committed
from hpcrl.rundir.layout import Run, step_of, version_of
from hpcrl.rundir.ledger import require_newest
from hpcrl.rundir.space import explained
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.committer import save_tensors

SHARD_BYTES = 2 << 30


class Publisher:
    """Writes what the policy is after a step. Every method is called by all ranks; rank 0 alone touches files.

    Args:
        dtype: of the written tensors, generator.inference_engine.model_dtype.
        max_staleness: steps that a sample may be old; it decides how many versions must stay readable.
    """

    def __init__(self, run: Run, attempt: int, world: World, dtype: torch.dtype, max_staleness: int) -> None:
        self._run, self._attempt, self._world, self._dtype = run, attempt, world, dtype
        self._kept_versions = max_staleness + 2

    def resume(self, engine: PolicyEngine, step: int) -> None:
        """Make weights/ fit a training that continues after `step`: version `step` is there, and none above it."""
        self._forget_after(step)
        # version 0 is the initial model where it lies; what an earlier attempt published of this step is the same
        if step > 0 and not self._world.rank0_broadcast(lambda: is_committed(self._run.weights_of(step))):
            self.publish(engine, step)

    def _forget_after(self, step: int) -> None:
        def forget() -> None:
            self._fence()
            for path in list(self._run.weights.iterdir()) if self._run.weights.is_dir() else []:
                version = version_of(path)
                if (version is not None and version > step) or path.name.startswith((".tmp-", ".trash-")):
                    discard(path, self._fence)

        self._world.rank0_broadcast(forget)

    def publish(self, engine: PolicyEngine, version: int) -> None:
        """Commit weights/v<version>; what this attempt has committed is being read and stays as it is.

        Raises:
            CommitError: on every rank: they could not be written, or a newer attempt has begun.
        """
        target = self._run.weights_of(version)
        if self._world.rank0_broadcast(lambda: committed_by(target)) == self._attempt:
            return
        self._write(engine, target, version=version)
        self._world.rank0_broadcast(self._retire)

    def _retire(self) -> None:
        for old in committed(self._run.weights, version_of)[: -self._kept_versions]:
            discard(self._run.weights_of(old), self._fence)

    def _fence(self) -> None:
        if self._attempt:  # 0 writes beside the run's attempts, whatever these do
            require_newest(self._run, self._attempt)

    def export(
        self, engine: PolicyEngine, step: int, model: str, template: ChatTemplateConfig, target: Path | None = None
    ) -> Path:
        """Commit a model directory for transformers and vLLM, and return it; what this attempt has committed stays as it is.

        Args:
            model: whose tokenizer it gets.
            template: chat template with which the policy was trained; the tokenizer keeps it.
            target: the directory; None: exports/s<step>.

        Raises:
            ConfigError: as `load_tokenizer`.
            CommitError: on every rank: it could not be written, or a newer attempt has begun.
        """

        def complete(directory: Path) -> None:
            engine.export_config(directory, self._dtype)
            load_tokenizer(model, template).save_pretrained(directory)

        place = target or self._run.export(step)
        if self._world.rank0_broadcast(lambda: committed_by(place)) != self._attempt:
            self._write(engine, place, complete, step=step)
        return place

    def misses_export(self, start: Path | None) -> bool:
        """Return whether training starts from a checkpoint of this run, after a step, of which there is no export."""
        step = step_of(start) if start is not None and start.parent == self._run.checkpoints else None
        return step is not None and not self._world.rank0_broadcast(lambda: is_committed(self._run.export(step)))

    def _write(
        self, engine: PolicyEngine, target: Path, complete: Callable[[Path], None] = lambda _: None, **facts: int
    ) -> None:
        pieces, failure = engine.export_weights(self._dtype), None

        def write() -> None:
            with explained(target), committed_directory(target, self._attempt, fence=self._fence, **facts) as directory:
                write_safetensors(directory, pieces, SHARD_BYTES)
                complete(directory)

        if self._world.first:
            try:
                write()
            except HpcrlError as error:
                failure = error
        for _ in pieces:  # gathering takes all ranks, also when the first has given up
            pass

        def conclude() -> None:
            if failure is not None:
                raise failure

        self._world.rank0_broadcast(conclude)


def write_safetensors(directory: Path, pieces: Iterator[dict[str, torch.Tensor]], shard_bytes: int) -> None:
    """Write tensors into files of at most `shard_bytes` (a single larger tensor gets a file alone) and an index.

    Only one file's tensors are in memory at a time.
    """
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = files = 0

    def flush() -> None:
        nonlocal files
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_tensors(shard, directory / name, {"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for piece in pieces:
        for name, tensor in piece.items():
            if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > shard_bytes:
                flush()
            shard[name] = tensor.contiguous()
            total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
