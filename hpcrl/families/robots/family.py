"""Common parts of families whose policies move robots (section `vla`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.config.family import Family
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.rundir.layout import Run

if TYPE_CHECKING:
    from hpcrl.data.vision.videos import EpisodeVideos


class Robots(Family):
    def samples_at_once(self, config: ConfigTree) -> tuple[str, int]:
        """Return the number of simulators, where it is set."""
        most = config.vla.num_envs
        return super().samples_at_once(config) if most is None else ("vla.num_envs", most)

    def generates_in_waves(self, config: ConfigTree) -> bool:
        return not config.vla.continuous


def videos_of(run: Run, vla: VLAConfig) -> EpisodeVideos | None:
    """Return the videos of a run's episodes; None: none are written."""
    from hpcrl.data.vision.videos import EpisodeVideos

    return EpisodeVideos(run, vla.trace_verbosity > 1) if vla.enable and vla.save_video else None
