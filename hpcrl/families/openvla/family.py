"""OpenVLA (arXiv:2406.09246) and OpenVLA-OFT (arXiv:2502.19645): language models that move a robot by tokens that stand for numbers."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.config.derive import compares_with_reference
from hpcrl.config.family import Config
from hpcrl.config.rules.families.vla import RULES
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.families.robots import Robots


class OpenVLA(Robots):
    name, package = "openvla", "hpcrl.families.openvla"
    brings = "rollout", "launch"
    rules = RULES

    def matches(self, config: ConfigTree) -> bool:
        return config.vla.enable and config.vla.vla_type != "pi05"

    def settled(self, config: Config) -> Config:
        """Return a configuration whose models have what follows from `vla.vla_type` and `vla.use_proprio` as entries of config.json."""
        vla, trainer = config.vla, config.trainer
        if vla.vla_type != "openvla-oft":
            return config
        entries = {"parallel_decoding": True, **({"use_proprio": True} if vla.use_proprio else {})}
        sections = {"policy": trainer.policy, **({"ref": trainer.ref} if compares_with_reference(trainer) else {})}
        changed = {
            role: replace(section, model_config_kwargs=section.model_config_kwargs | entries)
            for role, section in sections.items()
        }
        return replace(config, trainer=replace(trainer, **changed))


FAMILY = OpenVLA()
