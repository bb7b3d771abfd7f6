"""What follows from the settings of PI0.5."""

from __future__ import annotations

from hpcrl.config.sections.vla import VLAConfig


def moves_by_flow(vla: VLAConfig) -> bool:
    """Return whether the policy is PI0.5, which moves a robot by chunks of numbers that a flow makes."""
    return vla.enable and vla.vla_type == "pi05"
