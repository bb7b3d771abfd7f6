"""Generator and engine of pipelines: its functions are those of hpcrl.rollout.family.RolloutFamily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config import Config
from hpcrl.rollout.family import LoadedGenerator
from hpcrl.rollout.images.saved import SampleImages
from hpcrl.rundir.layout import Run

if TYPE_CHECKING:
    from hpcrl.rollout.engines.base import Launched


def load_generator(run: Run, config: Config, interval: int | None) -> LoadedGenerator:
    from hpcrl.families.diffusion.generate import pictures
    from hpcrl.families.diffusion.pipelines.tokens import row_decoder

    kept = SampleImages(run, interval) if interval else None
    maker = pictures(config.generator, config.environment, kept)
    return LoadedGenerator(lambda **_: maker, row_decoder(config.trainer.policy.model.pretrained))


def own_engine(config: Config) -> Launched:
    from hpcrl.families.diffusion.engine import PipelineEngine

    return PipelineEngine.of(config)
