"""Section `data`: which prompts are trained and evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcrl.config.location import Location


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_data: list[Location]
    """Datasets of training prompts, concatenated in order."""

    val_data: list[Location] = field(default_factory=list)
    """Datasets of evaluation prompts; scores are reported per `data_source` column, not per file."""
