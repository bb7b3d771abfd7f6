"""Pipelines of diffusers, which make pictures or videos."""

from __future__ import annotations

from hpcrl.config.family import Family
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.families.diffusion.rules import RULES
from hpcrl.families.diffusion.settings import trains_by_nft


class DiffusionFamily(Family):
    name, package = "diffusion", "hpcrl.families.diffusion"
    brings = "data", "rollout", "trainer", "plan", "launch"
    backend, chosen_by = "diffusers", "trainer.policy.diffusers.enable"
    rules = RULES
    model_file, model_kind = "model_index.json", "directory of a diffusion pipeline"
    writes_texts = exports_tokenizer = False
    greedy_samples_differ = keeps_evaluation_pictures = True

    def matches(self, config: ConfigTree) -> bool:
        return config.trainer.policy.diffusers.enable

    def longest_row(self, config: ConfigTree) -> int:
        """Return the tokens of a prompt, and the entry that stands for the row's noise level."""
        return config.trainer.policy.diffusers.max_prompt_length + 1

    def limits_passes_by_tokens(self, config: ConfigTree) -> bool:  # noqa: ARG002
        return False

    def compares_logprobs(self, config: ConfigTree) -> bool:
        return not trains_by_nft(config.trainer)


FAMILY = DiffusionFamily()
