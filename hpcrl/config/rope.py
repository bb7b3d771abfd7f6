"""Rotary positions: what trainer.rope_* and generator.rope_* make of a model's own."""

from __future__ import annotations

from typing import Any


def rope_parameters(own: dict[str, Any], scaling: dict[str, Any], theta: float | None) -> dict[str, Any]:
    """Return the entry `rope_parameters` of config.json, for trainer and engines alike.

    It is given whole: transformers and vLLM let a base that stands in the model's own rope_parameters win over a rope_theta beside it.

    Args:
        own: the model's rope_parameters.
        scaling: replaces them but for the base; empty: the model's own.
        theta: the base; None: that of `scaling`, else the model's own.
    """
    parameters = {"rope_theta": own["rope_theta"], **(scaling or own)}
    return parameters if theta is None else parameters | {"rope_theta": theta}
