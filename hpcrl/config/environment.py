"""Section `environment`: what scores a response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    env_class: str | None = None
    """Environment of rows that have no env_class column; unset: every row must have one."""
