"""Returns the transformers class of a model, by its inputs."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from hpcrl.data.vision.families import family_of


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class that builds the model of a configuration, hpcrl's own models among them."""
    if family_of(config) is None:
        return AutoModelForCausalLM
    import hpcrl.data.models.openvla.model  # noqa: F401  registers it with transformers

    return AutoModelForImageTextToText
