"""The policy as a model that others load: weights/v<k> for the inference engines, exports/s<k> for people.

Both are the same files, safetensors under Hugging Face names; an export adds configuration and tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from hpcrl.config.generator import ChatTemplateConfig
from hpcrl.data.chat import load_tokenizer
from hpcrl.run.commit import committed, committed_directory, discard, is_committed
from hpcrl.run.layout import Run, version_of
from hpcrl.trainer.engine import PolicyEngine
from hpcrl.trainer.world import World

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
        if step > 0:  # version 0 is the initial model where it lies
            self.publish(engine, step)

    def _forget_after(self, step: int) -> None:
        if self._world.first and self._run.weights.is_dir():
            for path in list(self._run.weights.iterdir()):
                version = version_of(path)
                if (version is not None and version > step) or path.name.startswith((".tmp-", ".trash-")):
                    discard(path)
        self._world.barrier()

    def publish(self, engine: PolicyEngine, version: int) -> None:
        """Commit weights/v<version>; one that is committed is being read and stays as it is."""
        target = self._run.weights_of(version)
        if self._world.look(lambda: is_committed(target)):
            return
        self._write(engine, target, version=version)
        if self._world.first:
            for old in committed(self._run.weights, version_of)[: -self._kept_versions]:
                discard(self._run.weights_of(old))

    def export(self, engine: PolicyEngine, step: int, model: str, template: ChatTemplateConfig) -> None:
        """Commit exports/s<step>, a model directory for transformers and vLLM.

        Args:
            model: whose tokenizer it gets.
            template: chat template with which the policy was trained; the tokenizer keeps it.

        Raises:
            ConfigError: as `load_tokenizer`.
        """

        def complete(directory: Path) -> None:
            engine.export_config(directory, self._dtype)
            load_tokenizer(model, template).save_pretrained(directory)

        target = self._run.export(step)
        if not self._world.look(lambda: is_committed(target)):
            self._write(engine, target, complete, step=step)

    def _write(
        self, engine: PolicyEngine, target: Path, complete: Callable[[Path], None] = lambda _: None, **facts: int
    ) -> None:
        pieces = engine.export_weights(self._dtype)
        if not self._world.first:
            for _ in pieces:
                pass
        else:
            with committed_directory(target, self._attempt, **facts) as directory:
                write_safetensors(directory, pieces, SHARD_BYTES)
                complete(directory)
        self._world.barrier()


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
        save_file(shard, directory / name, {"format": "pt"})
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
