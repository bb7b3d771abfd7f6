"""PI0.5 (arXiv:2504.16054): a policy that moves a robot by chunks of numbers, which a flow makes."""

from __future__ import annotations

from hpcrl.config.sections.tree import ConfigTree
from hpcrl.families.pi05.rules import RULES
from hpcrl.families.robots.family import Robots


class Pi05Family(Robots):
    name, package = "pi05", "hpcrl.families.pi05"
    brings = "data", "rollout", "trainer", "plan", "launch"
    backend, chosen_by = "transformers", 'vla.vla_type="pi05"'
    rules = RULES
    writes_texts = False

    def matches(self, config: ConfigTree) -> bool:
        return config.vla.moves_by_flow


FAMILY = Pi05Family()
