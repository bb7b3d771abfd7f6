"""Generator and engine of PI0.5: its functions are those of hpcrl.rollout.family.RolloutFamily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config import Config
from hpcrl.families.robots.family import videos_of
from hpcrl.rollout.family import LoadedGenerator
from hpcrl.rundir.layout import Run

if TYPE_CHECKING:
    from hpcrl.rollout.engines.base import Launched


def load_generator(run: Run, config: Config, interval: int | None) -> LoadedGenerator:  # noqa: ARG001
    from hpcrl.families.pi05.generate import Robotics, actions
    from hpcrl.families.pi05.inputs import row_decoder

    model = config.trainer.policy.model.pretrained
    videos = videos_of(run, config.vla)
    maker = actions(config.generator, config.environment, config.vla, Robotics.of(model), videos)
    return LoadedGenerator(lambda **_: maker, row_decoder(model))


def own_engine(config: Config) -> Launched:
    from hpcrl.families.pi05.engine import Actions

    return Actions(config)
