"""Declares what the configuration requires of a policy's family, and returns the family of a configuration's policy.

A family is a package such as hpcrl.families.diffusion. Its object `FAMILY` answers the configuration; its modules answer the layers above, each by a
Protocol that stands in `family.py` of the layer: `data`, `rollout`, `trainer`, `plan`, `launch`. All of them are imported by name when they are
needed, so that no layer depends on a family.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar

from hpcrl.config.errors import Problem
from hpcrl.config.import_path import installed
from hpcrl.config.sections.tree import ConfigTree

GROUP = "hpcrl.families"
"""The entry points of other packages; each leads to an object as `Family`. hpcrl's own families are listed in hpcrl/families/__init__.py."""

Layer = Literal["data", "rollout", "trainer", "plan", "launch"]
Config = TypeVar("Config", bound=ConfigTree)


class Family:
    """A family of policies. The answers here are those of language models.

    Attributes:
        name: for messages.
        package: with the modules of `brings`.
        brings: layers that the family has a module for; of the others the text family's is used.
        backend: value of generator.inference_engine.backend with which the family's own engine generates; None: engines of language models do.
        chosen_by: setting that chooses the family, for messages.
        rules: refuse combinations of settings. They run for all configurations, those of other families too.
        model_file: the file that a directory with a model has.
        model_kind: names such a directory in messages.
        writes_texts: the policy reads and writes with a chat template.
        exports_tokenizer: an exported model has a tokenizer of its own.
        greedy_samples_differ: samples of a prompt differ at temperature 0.
        keeps_evaluation_pictures: `hpcrl eval` keeps the pictures of its samples.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    brings: ClassVar[tuple[Layer, ...]] = ()
    backend: ClassVar[str | None] = None
    chosen_by: ClassVar[str] = ""
    rules: ClassVar[tuple[Callable[[ConfigTree], Iterator[Problem]], ...]] = ()
    model_file: ClassVar[str] = "config.json"
    model_kind: ClassVar[str] = "model directory"
    writes_texts: ClassVar[bool] = True
    exports_tokenizer: ClassVar[bool] = True
    greedy_samples_differ: ClassVar[bool] = False
    keeps_evaluation_pictures: ClassVar[bool] = False

    def matches(self, config: ConfigTree) -> bool:
        """Return whether the policy of a configuration is one of the family."""
        raise NotImplementedError

    def settled(self, config: Config) -> Config:
        """Return a configuration with the settings that follow from the family's own."""
        return config

    def longest_row(self, config: ConfigTree) -> int | None:
        """Return the most tokens of a dataset's row that is trained; None: the configuration lacks the setting."""
        return config.trainer.max_length

    def limits_passes_by_tokens(self, config: ConfigTree) -> bool:  # noqa: ARG002
        """Return whether the tokens of a micro-batch measure what its forward pass costs."""
        return True

    def compares_logprobs(self, config: ConfigTree) -> bool:  # noqa: ARG002
        """Return whether the loss compares log-probabilities of samples with those of the old policy or of a reference."""
        return True

    def samples_at_once(self, config: ConfigTree) -> tuple[str, int]:
        """Return the setting that limits the samples that a replica generates at a time, and its value."""
        return "generator.inference_engine.max_num_seqs", config.generator.inference_engine.max_num_seqs

    def generates_in_waves(self, config: ConfigTree) -> bool:  # noqa: ARG002
        """Return whether a replica begins groups only after all of those before them are finished."""
        return False

    def check_entries(self, config: ConfigTree, entries: Mapping[str, Any]) -> Iterator[Problem]:  # noqa: ARG002
        """Yield what does not fit between a configuration, that of any family, and the entries of its model's config.json."""
        yield from ()

    def layer(self, name: Layer) -> ModuleType:
        """Import the family's module for a layer."""
        return importlib.import_module(f"{(self if name in self.brings else families()[-1]).package}.{name}")


def family_of(config: ConfigTree) -> Family:
    """Return the family of a configuration's policy: the first that matches."""
    return next(family for family in families() if family.matches(config))


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Return all families: those of other packages, then hpcrl's own, with the text family, which takes every configuration, last."""
    own: tuple[str, ...] = importlib.import_module("hpcrl.families").PACKAGES
    others = installed(GROUP, "family", Family)
    return (*others, *(importlib.import_module(f"{package}.family").FAMILY for package in own))
