"""Rules about Megatron-core's parallel layouts that hold whatever the model is."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcrl.config.errors import Problem, shown
from hpcrl.config.sections.megatron import LAYOUT, MegatronModelConfig
from hpcrl.config.sections.tree import ConfigTree

_PATH = "trainer.policy.megatron_config"


def product(**sizes: int) -> str:
    """Return sizes and what they give together, as an error shows them: 2 (tensor) x 3 (pipeline) = 6."""
    shown_sizes = [f"{size} ({name.replace('_', ' ')})" for name, size in sizes.items()]
    return f"{' x '.join(shown_sizes)} = {math.prod(sizes.values())}"


def shared_sample(sizes: MegatronModelConfig) -> str:
    """Return how many ranks share a sample, with the arithmetic."""
    return product(
        tensor=sizes.tensor_model_parallel_size,
        pipeline=sizes.pipeline_model_parallel_size,
        context=sizes.context_parallel_size,
    )


def expert_sizes(config: ConfigTree) -> Iterator[Problem]:
    sizes, ranks = config.trainer.policy.megatron_config, config.trainer.placement.policy_ranks
    if config.trainer.strategy != "megatron":
        return
    expert, tensor, own = sizes.expert_model_parallel_size, sizes.experts_tensor_size, sizes.expert_tensor_parallel_size
    pipeline = sizes.pipeline_model_parallel_size
    if (expert > 1 or own is not None) and ranks % (expert * tensor * pipeline):
        yield Problem(
            f"{_PATH}.expert_model_parallel_size",
            f"{product(expert=expert, expert_tensor=tensor, pipeline=pipeline)} ranks share each copy of the experts, which does not "
            f"divide the {ranks} ranks (trainer.placement); make the ranks a multiple of it",
        )


def pipeline(config: ConfigTree) -> Iterator[Problem]:
    sizes, schedule = config.trainer.policy.megatron_config, f"{_PATH}.pipeline_schedule"
    if config.trainer.strategy != "megatron":
        return
    stages, layers = sizes.pipeline_model_parallel_size, sizes.pipeline_layers_per_stage
    if sizes.pipeline_schedule == "Interleaved1F1B" and stages == 1:
        yield Problem(schedule, f'needs {_PATH}.pipeline_model_parallel_size above 1; raise that, or set "1F1B"')
    elif sizes.pipeline_schedule == "Interleaved1F1B" and layers is None:
        yield Problem(
            f"{_PATH}.pipeline_layers_per_stage",
            f"required with {schedule}=Interleaved1F1B: the layers of a virtual stage, several of which make those of a rank",
        )
    if layers is not None and sizes.pipeline_schedule != "Interleaved1F1B":
        yield Problem(
            f"{_PATH}.pipeline_layers_per_stage",
            f"has no effect with {schedule}={sizes.pipeline_schedule}, where a rank has one stage; set Interleaved1F1B, or leave it out",
        )


def reference_layout(config: ConfigTree) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.strategy != "megatron" or not trainer.colocated_reference:
        return
    for name in LAYOUT:
        own, policy = getattr(trainer.ref.megatron_config, name), getattr(trainer.policy.megatron_config, name)
        if own not in (None, policy):
            yield Problem(
                f"trainer.ref.megatron_config.{name}",
                f"expected the policy's {shown(policy)}, whose ranks the reference shares, found {shown(own)}; leave it out",
            )
