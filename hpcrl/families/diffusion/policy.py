"""A diffusion policy on FSDP2: PolicyEngine (hpcrl/trainer/backends/base.py) for the transformer of a pipeline.

Beside the trained weights its state has the sampling weights (`old`) where DiffusionNFT compares with them, and an exponential moving
average (`average`) where one is evaluated. Both are adapters like the trained ones, and are swapped in while they are used.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcrl.algorithms.diffusion.averages import average_decay, copy_decay, is_averaged
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.families.diffusion.model import DiffusionModel, transformer_source
from hpcrl.families.diffusion.pipelines.kinds import Conditions
from hpcrl.families.diffusion.pipelines.parts import Parts
from hpcrl.families.diffusion.pipelines.probe import probe_velocity
from hpcrl.families.diffusion.pipelines.samples import CLEAN, GIVEN, IMAGE, NOISE_SEED, PROMPT, STEPS
from hpcrl.families.diffusion.pipelines.source import EVALUATION, PipelineSource
from hpcrl.families.diffusion.rows import StepRows
from hpcrl.families.diffusion.settings import trains_by_nft
from hpcrl.families.diffusion.tasks import Other, Points, task_of
from hpcrl.trainer.backends.base import MicroBatches, Objective, merge
from hpcrl.trainer.backends.fsdp.engine import FsdpExported
from hpcrl.trainer.backends.fsdp.model import free_gathered, load_model
from hpcrl.trainer.backends.fsdp.sharding import accumulated, local
from hpcrl.trainer.backends.shards import read
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.adapter import PARTS, Adapter
from hpcrl.trainer.models.build import forward_config
from hpcrl.trainer.models.forward import DTYPES
from hpcrl.trainer.models.layers.choice import Kernels
from hpcrl.trainer.models.lora import without_adapters
from hpcrl.types import MicroBatch

OLD, AVERAGE = "old", "average"
"""Folders of a checkpoint."""
_NO_VOCABULARY = "a denoising step has no vocabulary; rules of the configuration refuse what asks for it"
_INDEX, _DIFFUSERS_INDEX = "model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"


class DiffusionPolicy(FsdpExported[DiffusionModel]):
    """The policy."""

    def __init__(self, trainer: TrainerConfig, world: World) -> None:
        section, source = trainer.policy, transformer_source(trainer)
        self._pipeline, self._settings, self._task = (
            source.pipeline,
            section.diffusers,
            task_of(trainer, source.pipeline),
        )
        self.dtype = DTYPES[section.fsdp_config.mixed_precision.param_dtype]
        made = partial(
            DiffusionModel,
            kind=self._pipeline.kind,
            dtype=self.dtype,
            guidance=section.diffusers.sample.guidance_scale,
        )
        model = load_model(
            made, source, section.fsdp_config, replace(forward_config(trainer), packing=False, flash=False), world,
            trained=section, seed=trainer.seed, kernels=Kernels.of(section),
        )  # fmt: skip
        super().__init__(model, source, section, trainer.recomputation, world)
        self._idle = self._pipeline.kind.idle_conditions(self._pipeline.transformer)
        self._latents = self._pipeline.latent_shape(section.diffusers.train_frames)
        self._old = self._copied() if trains_by_nft(trainer) else {}
        self._average = self._copied() if section.diffusers.ema.enable else {}
        self._encoder = RowEncoder(self._pipeline, world.device, trainer.seed) if trainer.offline else None

    @property
    def vocabulary(self) -> int:
        entries = self._pipeline.entries("text_encoder/config.json")
        return int(entries.get("text_config", entries)["vocab_size"])

    def forward_backward(self, batches: MicroBatches, objective: Objective) -> dict[str, torch.Tensor]:
        totals: dict[str, torch.Tensor] = {}
        for batch in accumulated(self._model, batches, offloaded=self._offloaded):
            batch = batch.to(self._world.device)
            rows = self._rows(batch, self.updates)
            points = self._points(rows)
            others: dict[Other, torch.Tensor] = {
                other: self._velocity_of(other, rows, points) for other in self._task.compares
            }
            outputs = self._task.outputs(rows, points, self._velocity(rows, points), others)
            loss, sums = objective(batch, *(rows.scattered(values, len(batch.token_ids)) for values in outputs))
            (loss * self._scale.value if self._scale.changes else loss).backward()
            merge(totals, sums)
        return totals

    def end_batch(self, step: int) -> None:
        decay = copy_decay(self._settings.weight_copy_decay_type, step)
        self._follow(self._old, 1 - decay)
        ema = self._settings.ema
        if is_averaged(step - 1, ema.update_step_interval):
            self._follow(self._average, 1 - average_decay(step - 1, ema.decay))

    def logprobs(self, batches: MicroBatches, *, reference: bool = False) -> Iterator[torch.Tensor]:
        return (logprobs_P for logprobs_P, _ in self._scored(batches, reference=reference))

    def entropies(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        return (entropies_P for _, entropies_P in self._scored(batches, reference=False))

    def logprobs_and_norms(self, batches: MicroBatches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        raise NotImplementedError(_NO_VOCABULARY)

    def top_logprobs(
        self, batches: MicroBatches, *, reference: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        raise NotImplementedError(_NO_VOCABULARY)

    def reset_reference(self, *, fresh_optimizer: bool, rate: float = 1.0) -> None:
        raise NotImplementedError("rules of the configuration refuse references that follow a diffusion policy")

    def _scored(self, batches: MicroBatches, *, reference: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        for batch in batches:
            batch = batch.to(self._world.device)
            rows = self._rows(batch, None)
            points = self._points(rows)
            with self._scoring(reference=reference), torch.no_grad():
                velocity = self._velocity(rows, points)
                outputs = self._task.outputs(rows, points, velocity, {})
                free_gathered(self._model)
            yield tuple(rows.scattered(values, len(batch.token_ids)) for values in outputs)

    @contextmanager
    def _scoring(self, *, reference: bool) -> Iterator[None]:
        """Compute as the reference for a while, or as the evaluated weights where rows of datasets are trained."""
        with without_adapters(self._model) if reference else self._evaluated() if self._encoder else nullcontext():
            yield

    def _rows(self, batch: MicroBatch, update: int | None) -> StepRows:
        """Return the trained steps of a micro-batch; of rows of datasets, with the noise of that optimizer step, or the same each time."""
        samples = [tensors for tensors in batch.tensors if tensors]
        if self._encoder is not None:
            samples = self._encoder.encoded(samples, update)
        return StepRows.of(batch, samples, self._idle, guided=self._task.guided)

    def _points(self, rows: StepRows) -> Points:
        if rows.samples:
            return self._task.points(rows)
        return Points(
            torch.zeros(1, *self._latents, device=rows.entries.device), torch.ones(1, device=rows.entries.device)
        )

    def _velocity(self, rows: StepRows, points: Points) -> torch.Tensor:
        return self._model(points.x, points.t, rows.given, rows.free)

    @torch.no_grad()
    def _velocity_of(self, other: Other, rows: StepRows, points: Points) -> torch.Tensor:
        with self._holding(self._old) if other == OLD else without_adapters(self._model):
            found = self._velocity(rows, points)
            free_gathered(self._model)
        return found

    @torch.no_grad()
    def _follow(self, copy: dict[str, torch.Tensor], rate: float) -> None:
        """Update an average of trained weights, by a share of the difference."""
        free_gathered(self._model)
        values = self._trained()
        for name, held in copy.items():
            local(held).lerp_(local(values[name]), rate)

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        """Compute as the evaluated and exported policy for a while: the average, where there is one."""
        with self._holding(self._average) if self._average else nullcontext():
            yield

    def sampling_adapter(self) -> Adapter | None:
        """Return the adapter for training samples, and beside it, under names of its own, the one for evaluation where it differs."""
        if not self._lora.rank:
            return None
        with self._holding(self._old) if self._old else nullcontext():
            found = self._adapter()
        if not (self._average or self._settings.weight_copy_decay_type):
            return found
        with self._evaluated():
            evaluated = self._adapter().scaled(torch.float32)
        pairs = {
            f"{each.name}{part}": tensor
            for each in evaluated.layers
            for part, tensor in zip(PARTS, (each.A, each.B), strict=True)
        }
        return replace(found, whole={f"{EVALUATION}{name}": tensor for name, tensor in pairs.items()})

    def adapter(self) -> Adapter | None:
        if not self._lora.rank:
            return None
        with self._evaluated():
            return self._adapter()

    def _adapter(self) -> Adapter:
        found = super()._adapter()
        return replace(found, config=replace(found.config, task_type=None))

    def export_weights(self, dtype: torch.dtype, owners: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
        with self._evaluated():
            yield from super().export_weights(dtype, owners)

    def _named_on_the_hub(self, piece: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return piece

    def export_config(self, directory: Path, dtype: torch.dtype) -> None:  # noqa: ARG002
        """Write the configuration with which diffusers loads the exported transformer."""
        if self._world.first:
            self._model.model.save_config(directory)  # pyright: ignore[reportCallIssue]
            shutil.copyfile(directory / _INDEX, directory / _DIFFUSERS_INDEX)

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        def velocity(x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
            device = self._world.device
            return self._model(x.to(device), t.to(device), {name: each.to(device) for name, each in conditions.items()})

        with torch.no_grad(), self._holding(self._old) if self._old else nullcontext():
            found = probe_velocity(velocity, self._latents, self._idle, token_ids)
            free_gathered(self._model)
        return found

    def _copies(self) -> dict[str, dict[str, Any]]:
        return {name: copy for name, copy in ((OLD, self._old), (AVERAGE, self._average)) if copy}

    def _states(self) -> dict[str, dict[str, Any]]:
        return super()._states() | self._copies()

    def restore(self, directory: Path) -> None:
        super().restore(directory)
        self._restore_copies(directory)

    def restore_weights(self, directory: Path) -> None:
        super().restore_weights(directory)
        self._restore_copies(directory)

    def _restore_copies(self, directory: Path) -> None:
        for name, copy in self._copies().items():
            if self._world.rank0_broadcast(lambda place=directory / name: place.is_dir()):
                read(copy, directory / name, self._world)
            else:  # of a run that had none
                self._follow(copy, 1.0)


class RowEncoder:
    """The encoders of a pipeline on a rank's device, or in host memory but while they are used (trainer.policy.diffusers.offload).

    Args:
        seed: of all noise.
    """

    def __init__(self, source: PipelineSource, device: torch.device, seed: int) -> None:
        self._source, self._device, self._seed = source, device, seed
        self._parts = Parts(source, device, encoders_only=True)

    @torch.no_grad()
    def encoded(self, rows: Sequence[Mapping[str, torch.Tensor]], update: int | None) -> list[dict[str, torch.Tensor]]:
        """Return the tensors of each row, named as those of generated samples, with one step of each.

        Args:
            rows: as `PictureRows.tensors` (hpcrl/families/diffusion/pipelines/pictures.py) returns them.
            update: optimizer steps so far, each with noise of its own; None: always the same noise.
        """
        if not rows:
            return []
        prompts = [bytes(row[PROMPT].cpu().numpy()).decode() for row in rows]
        given = self._parts.conditions(prompts)
        clean = self._parts.latents(torch.stack([row[IMAGE] for row in rows])).float()
        return [
            {
                STEPS: torch.zeros(1, dtype=torch.int32),
                CLEAN: clean[at],
                NOISE_SEED: torch.tensor([self._drawn(int(row[NOISE_SEED]), update)]),
                **{f"{GIVEN}{name}": value[at] for name, value in given.items()},
            }
            for at, row in enumerate(rows)
        ]

    def _drawn(self, row: int, update: int | None) -> int:
        digest = hashlib.blake2b(f"{self._seed} {row} {update}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
