"""Planning of PI0.5: its function is that of hpcrl.planning.family.PlanFamily."""

from __future__ import annotations

import torch

from hpcrl.config import Config
from hpcrl.families.pi05.policy import action_source
from hpcrl.planning.whole_model import memory_line, memory_of_parameters


def describe_policy(config: Config) -> tuple[list[str], dict[str, int]]:
    """Return lines about the policy, and its bytes on a rank by what they hold, activations not counted; errors as of PlanFamily."""
    source, settings = action_source(config.trainer), config.vla.pi05
    model = source.empty(torch.float32, "")
    parameters, parts = memory_of_parameters(config, model, copies=0)
    sizes = model.architecture
    lines = [
        f"policy: {type(model).__name__} of {source}, {parameters}",
        f"  {settings.noise_method}, {settings.num_steps} steps from noise to a chunk of {sizes.chunk_size} actions with {sizes.action_dim} numbers",
        f"{memory_line(parts)}; activations are not estimated",
        "engine: the same model; its memory is not estimated",
    ]
    return lines, parts
