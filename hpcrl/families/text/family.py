"""Language models, also those that see: every policy that no other family takes."""

from __future__ import annotations

from hpcrl.config.family import Family
from hpcrl.config.sections.tree import ConfigTree


class Text(Family):
    name, package = "text", "hpcrl.families.text"
    brings = "data", "rollout", "trainer", "plan", "launch"

    def matches(self, config: ConfigTree) -> bool:  # noqa: ARG002
        return True


FAMILY = Text()
