"""Planning of language models: its function is that of hpcrl.planning.family.PlanFamily."""

from __future__ import annotations

from hpcrl.config import Config


def describe_policy(config: Config) -> None:  # noqa: ARG001
    return None
