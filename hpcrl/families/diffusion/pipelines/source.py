"""A diffusers pipeline on disk or on the hub: its parts, and the loading of those that a process needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.diffusers import DiffusersConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import read_entries
from hpcrl.errors import DataError, RunError
from hpcrl.families.diffusion.pipelines.kinds import PipelineKind, Sana, StableDiffusion3
from hpcrl.families.diffusion.pipelines.videos import Cosmos, SanaVideo, Wan

if TYPE_CHECKING:
    import torch

KINDS: dict[str, PipelineKind] = {
    "StableDiffusion3Pipeline": StableDiffusion3(),
    "SanaPipeline": Sana(),
    "SanaVideoPipeline": SanaVideo(),
    "WanPipeline": Wan(),
    "Cosmos2_5_PredictBasePipeline": Cosmos(),
}
"""By the name of the pipeline's class in its model_index.json."""
INDEX = "model_index.json"
TRANSFORMER = "transformer"
EVALUATION = "evaluation."
"""How the names of tensors begin in a published version that only evaluation uses."""
_TYPES = "*.json", "*.safetensors", "*.txt", "*.model"


@dataclass(frozen=True)
class PipelineSource:
    """A pipeline.

    Args:
        model: its directory or name on the hub.
        settings: trainer.policy.diffusers.
    """

    model: Pretrained
    settings: DiffusersConfig

    @cached_property
    def folder(self) -> Path:
        """The directory with its files, downloaded where they are not here.

        Raises:
            DataError: there is none.
        """
        path = Path(self.model.path).expanduser()
        if path.is_dir():
            return path
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            return Path(snapshot_download(self.model.path, allow_patterns=list(_TYPES), **self.model.at_revision))
        except (OSError, HfHubHTTPError, HFValidationError) as error:
            raise self.not_a_pipeline(error) from error

    @cached_property
    def kind(self) -> PipelineKind:
        """Its kind.

        Raises:
            DataError: it is no pipeline, one that cannot be trained, or makes pictures where videos are configured, or the other way round.
        """
        index = self.entries(INDEX)
        name = index.get("_class_name")
        if not isinstance(name, str) or name not in KINDS:
            raise DataError(
                f"trainer.policy.model.path: {self.model} is a {name}; the pipelines that can be trained are {', '.join(KINDS)}"
            )
        found = KINDS[name]
        found.check(index)
        if found.videos != self.settings.is_video:
            makes = "videos" if found.videos else "pictures"
            raise DataError(
                f"trainer.policy.diffusers.is_video: {self.model} is a {name}, which makes {makes}; set it to {str(found.videos).lower()}"
            )
        return found

    def entries(self, file: str) -> Mapping[str, Any]:
        """Return a JSON file of the pipeline, by its path in it. Raises DataError where it cannot be read."""
        try:
            return read_entries(self.folder / file)
        except (OSError, DataError) as error:
            raise self.not_a_pipeline(error) from error

    @cached_property
    def transformer(self) -> Mapping[str, Any]:
        """The entries of the transformer's config.json."""
        return self.entries(f"{TRANSFORMER}/config.json")

    @property
    def patch(self) -> int:
        """Edge of the square of latents that is a token of the transformer; 1 frame deep."""
        found = self.transformer.get("patch_size", 1)
        return found if isinstance(found, int) else found[-1]

    def check(self) -> None:
        """Raise DataError where it differs from the configuration, or cannot make pictures of the configured size."""
        for frames in (self.settings.train_frames, self.settings.inference_frames):
            self.latent_shape(frames)

    def latent_shape(self, frames: int) -> tuple[int, ...]:
        """Return the shape of one sample's latents; errors as of `PipelineKind.latent_shape`."""
        return self.kind.latent_shape(
            self.transformer, self.entries("vae/config.json"), self.settings.inference_size, frames
        )

    def noise_levels(self) -> torch.Tensor:
        """Return the noise levels of the pipeline's schedule, from 1 to near 0, float32: those that diffusers' scripts train."""
        require_diffusers()
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

        entries = self.entries("scheduler/scheduler_config.json")
        shift = entries.get("shift", entries.get("flow_shift", 1.0))
        schedule: Any = FlowMatchEulerDiscreteScheduler(entries.get("num_train_timesteps", 1000), shift=shift or 1.0)
        return schedule.sigmas.float()

    def transformer_class(self) -> Any:
        """Return the class of its transformer. Raises DataError where diffusers has none of that name."""
        require_diffusers()
        import diffusers

        self.kind.prepare()
        name = self.transformer["_class_name"]
        try:
            return getattr(diffusers, name)
        except AttributeError as error:
            raise self.not_a_pipeline(f"diffusers {diffusers.__version__} has no {name}") from error

    def empty_transformer(self) -> Any:
        """Return its transformer without weights, on the meta device; errors as of `transformer_class`."""
        import torch

        with torch.device("meta"):
            return self.transformer_class().from_config(dict(self.transformer))

    def load(self, dtype: torch.dtype, *, encoders_only: bool = False) -> Any:
        """Return the whole pipeline, on the CPU, its VAE in float32. Raises DataError where it cannot be loaded.

        Args:
            encoders_only: its transformer has no weights.
        """
        require_diffusers()
        import torch
        from diffusers.utils import logging

        logging.disable_progress_bar()  # of no use in a log file
        parts = {name: part for name, part in self.entries(INDEX).items() if isinstance(part, list)}
        if odd := [part for part in parts.values() if len(part) != 2]:
            raise self.not_a_pipeline(f"{INDEX}: expected library and class of each part, found {odd[0]!r:.80}")
        missing = [name for name, (_, found) in parts.items() if found is None]
        left_out = dict.fromkeys([*missing, *self.kind.left_out])
        empty = {TRANSFORMER: self.empty_transformer()} if encoders_only else {}
        self.kind.prepare()
        try:
            pipeline: Any = self.kind.pipeline_class().from_pretrained(
                str(self.folder), dtype=dtype, **left_out, **empty
            )
        except (OSError, ValueError, RuntimeError, UnpicklingError) as error:
            raise self.not_a_pipeline(error) from error
        pipeline.vae.to(torch.float32)  # float16 overflows in it
        return pipeline

    def not_a_pipeline(self, error: Exception | str) -> DataError:
        said = " ".join(str(error).split())
        return DataError(f"trainer.policy.model.path: the diffusion pipeline {self.model} cannot be loaded: {said}")


def require_diffusers() -> None:
    """Raise RunError where diffusers is not installed."""
    if find_spec("diffusers") is None:
        raise RunError(
            "trainer.policy.diffusers.enable needs diffusers, which is not installed here: pip install 'hpcrl[diffusion]' (Python 3.11 or later)"
        )


def sigmas_of(scheduler: Any, steps: int, latents: tuple[int, ...], patch: int) -> list[float]:
    """Return the noise levels of a pipeline's scheduler, [steps + 1], from 1, or near it, to 0.

    Args:
        latents: shape of a sample's latents, on which a schedule with dynamic shifting depends.
        patch: latents that a token of the transformer covers, in each direction.
    """
    options: dict[str, Any] = {}
    if scheduler.config.get("use_dynamic_shifting"):
        options["mu"] = _shift(scheduler.config, latents[-1] * latents[-2] // patch**2)
    scheduler.set_timesteps(steps, **options)
    return [float(sigma) for sigma in scheduler.sigmas.tolist()[:steps]] + [0.0]


def _shift(config: Mapping[str, Any], tokens: int) -> float:
    """Return how far a schedule is shifted to the noise, on the line between the shifts of a small and of a large picture."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.16)
    return least + (most - least) * (tokens - low) / (high - low)
