"""Rules about GPUs that the trainer lends to engines while it waits (trainer.placement.lend)."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.errors import Problem
from hpcrl.config.sections.tree import ConfigTree

_LEND = "trainer.placement.lend"


def lent_gpus(config: ConfigTree) -> Iterator[Problem]:
    """Refuse lending where the trainer's GPUs cannot be lent, or no engine fits on them."""
    trainer, engine = config.trainer, config.generator.inference_engine
    if not trainer.placement.lend:
        return
    refused = (
        (trainer.placement.colocate_all, "engines have the trainer's GPUs already (trainer.placement.colocate_all)"),
        (
            trainer.has_own_critic,
            "a critic on nodes of its own would lend them too (trainer.placement.critic_num_nodes)",
        ),
        (
            trainer.fully_async.sync_weight_interval > 1,
            "engines wake with new weights, which each step must publish (trainer.fully_async.sync_weight_interval=1)",
        ),
    )
    for holds, reason in refused:
        if holds:
            yield Problem(_LEND, f"{reason}, or set it to false")
    own = trainer.placement.policy_num_gpus_per_node
    if engine.gpus > own:
        yield Problem(
            _LEND,
            f"a replica needs {engine.gpus} GPUs (tensor, pipeline and data parallel size), and the trainer has {own} on a node "
            "(trainer.placement.policy_num_gpus_per_node); set it to false",
        )
