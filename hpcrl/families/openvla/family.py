"""OpenVLA (arXiv:2406.09246) and OpenVLA-OFT (arXiv:2502.19645): language models that move a robot by tokens that stand for numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from hpcrl.config.errors import Problem
from hpcrl.config.family import Config
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.data.action_tokens import action_tokens, scale_of
from hpcrl.errors import DataError
from hpcrl.families.openvla.actions import States, disagreement
from hpcrl.families.robots.family import Robots
from hpcrl.families.robots.rules import RULES


class OpenVLA(Robots):
    name, package = "openvla", "hpcrl.families.openvla"
    brings = ("rollout",)
    rules = RULES

    def matches(self, config: ConfigTree) -> bool:
        return config.vla.enable and config.vla.vla_type != "pi05"

    def settled(self, config: Config) -> Config:
        """Return a configuration whose models have what follows from `vla.vla_type` and `vla.use_proprio` as entries of config.json."""
        vla, trainer = config.vla, config.trainer
        if vla.vla_type != "openvla-oft":
            return config
        entries = {"parallel_decoding": True, **({"use_proprio": True} if vla.use_proprio else {})}
        sections = {"policy": trainer.policy, **({"ref": trainer.ref} if trainer.compares_with_reference else {})}
        changed = {
            role: replace(section, model_config_kwargs=section.model_config_kwargs | entries)
            for role, section in sections.items()
        }
        return replace(config, trainer=replace(trainer, **changed))

    def check_entries(self, config: ConfigTree, entries: Mapping[str, Any]) -> Iterator[Problem]:
        tokens = action_tokens(entries)
        if (tokens is not None) != self.matches(config):
            yield Problem("vla.enable", disagreement(str(config.trainer.policy.model.pretrained), tokens))
        elif tokens is not None:
            yield from _of_actions(config.vla, {**entries, **config.trainer.policy.config_overrides})


def _of_actions(vla: VLAConfig, entries: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield differences between `vla` and a model with action tokens."""
    if entries.get("parallel_decoding") and vla.vla_type != "openvla-oft":
        yield Problem(
            "vla.vla_type",
            f'expected "openvla-oft", found "{vla.vla_type}": the model\'s config.json has parallel_decoding',
        )
    if find_spec("numpy") is None:  # as on a login node; the job compares them then
        return
    try:
        scale_of(entries, vla.unnorm_key, vla.norm_type)
        if vla.use_proprio:
            States.of(entries, vla)
    except DataError as error:
        path, _, message = str(error).partition(": ")
        yield Problem(path, message)


FAMILY = OpenVLA()
