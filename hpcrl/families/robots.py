"""Families whose policies move robots (section `vla`): what their configurations have in common."""

from __future__ import annotations

from hpcrl.config.family import Family
from hpcrl.config.sections.tree import ConfigTree


class Robots(Family):
    def samples_at_once(self, config: ConfigTree) -> tuple[str, int]:
        """Return the number of simulators, where it is set."""
        most = config.vla.num_envs
        return super().samples_at_once(config) if most is None else ("vla.num_envs", most)

    def generates_in_waves(self, config: ConfigTree) -> bool:
        return not config.vla.continuous
