"""What the tests of memory run in their ranks: memory_scenarios.py JSON. Each rank writes the bytes that its engines hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.fsdp.engine import FsdpCritic, FsdpEngine, FsdpPolicy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.packing import pack
from tests.trainer.material import make_sample


def held(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors on this rank."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    parts = (  # a tensor of a class of its own is made of plain ones
        [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        if hasattr(tensor, "__tensor_flatten__")
        else [tensor]
        for tensor in local
    )
    return sum(part.numel() * part.element_size() for several in parts for part in several)


def held_by(engine: FsdpEngine[Any]) -> dict[str, int]:
    """Train one micro-batch, and return the bytes of weights, of gradients before the step, and of the optimizer after it."""
    sample = make_sample(torch.Generator().manual_seed(1), 12, prompt=3)
    batch = pack([sample]).whole()
    engine.forward_backward([batch], lambda _, first_P, *_others: (first_P.sum(), {}))
    parameters = list(engine._model.parameters())
    found = {
        "weights": held(parameters),
        "gradients": held(parameter.grad for parameter in parameters if parameter.grad is not None),
    }
    engine.step()
    state = engine._optimizer.state.values()
    return found | {"optimizer": held(value for moments in state for value in moments.values())}


def bytes_of(world: World, trainers: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return what each configuration's policy, and its reference and critic, hold on this rank."""
    found: dict[str, dict[str, int]] = {}
    for name, section in trainers.items():
        trainer = build(TrainerConfig, section)
        policy = FsdpPolicy(trainer, 1.0, world)
        found[f"{name}/policy"] = held_by(policy)
        found[f"{name}/policy"]["weights"] += held(policy._reference_values.values())
        if policy._reference is not None:
            found[f"{name}/ref"] = {"weights": held(policy._reference.parameters()), "gradients": 0, "optimizer": 0}
        if trainer.critic.model.path is not None:
            found[f"{name}/critic"] = held_by(FsdpCritic(trainer, world))
    return found


def main() -> None:
    options = json.loads(sys.argv[1])
    with joined() as world:
        found = bytes_of(world, options["trainers"])
        Path(options["out"], f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
