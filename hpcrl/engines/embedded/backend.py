"""The embedded engine: transformers, in the rollout worker's own process."""

from __future__ import annotations

from hpcrl.config.backend import Backend
from hpcrl.config.sections.tree import ConfigTree


class EmbeddedBackend(Backend):
    name, title, package = "transformers", "the embedded engine", "hpcrl.engines.embedded"
    sampling = "ignore_eos", "min_tokens"
    records_experts = True

    def batch_dependence(self, config: ConfigTree) -> str | None:  # noqa: ARG002
        return None


BACKEND = EmbeddedBackend()
