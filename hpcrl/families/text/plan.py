"""Planning of language models, as hpcrl.planning.family.PlanFamily."""

from __future__ import annotations

from hpcrl.config import Config


def describe_policy(config: Config) -> None:  # noqa: ARG001
    return None
