"""What the tests of sending run in their ranks (tests/trainer/ranks.py): two ranks that publish, send, and one of which is a node too."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from hpcrl import faults as fault
from hpcrl.data.weight_files import PublishedWeights, WeightReader
from hpcrl.rollout.weights.copies import NodeCopies
from hpcrl.rollout.weights.fetch import fetch
from hpcrl.rollout.weights.receive import Receiver
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.publish import Publisher
from hpcrl.trainer.saving.send import WeightSender
from tests.trainer.saving.life import failing
from tests.trainer.scenarios import make_engine

HOST, STAGE_S = "127.0.0.1", 8.0  # a busy machine needs less


def sent(world: World, options: dict[str, Any]) -> None:
    """Publish four versions, the second and fourth as changes, and have a node fetch each; note what it got, and how."""
    out = Path(options["out"])
    run, engine, found = Run(out.parent / "sent"), make_engine(world, options["model"], {}), []
    if world.first:
        write_text(run.token, "secret", mode=0o600)
    world.barrier()
    sender = WeightSender(run, 1, world.rank, torch.device("cpu"), HOST, STAGE_S)
    publisher = Publisher(run, 1, world, torch.bfloat16, kept_versions=9, full_interval=2, sender=sender)
    node = NodeCopies(out.parent / "node", run, 1, Receiver(run, 1, False, HOST, STAGE_S)) if world.first else None
    for version in range(1, 5):
        with torch.no_grad():
            for parameter in engine._model.parameters():
                parameter.mul_(1.003)
        publisher.publish(engine, version)
        owners = [0] * len(engine.export_pieces(torch.bfloat16))
        policy = {
            name: tensor.clone()
            for piece in engine.export_weights(torch.bfloat16, owners)
            for name, tensor in piece.items()
        }
        # of one of the two that send, over the pair that it has, and over another
        with failing(world, 1, "weights.send:sleep=20 weights.send@2:sleep=20" if version == 3 else ""):
            if node:
                found.append(_fetched(run, version, node, policy))
            world.barrier()
    if node:
        found.append(_fetched(run, 2, node, None))
        node.close()
        late = NodeCopies(out.parent / "late", run, 1, Receiver(run, 1, False, HOST, STAGE_S))
        found.append(_fetched(run, 4, late, policy))
        late.close()
        out.write_text(json.dumps(found))


def _fetched(run: Run, version: int, node: NodeCopies, policy: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    fault._passed.clear()
    weights = fetch(run.weights_of(version), node)
    with closing(WeightReader(weights.path)) as reader:
        same = all(policy is None or torch.equal(tensor, policy[name]) for name, tensor, _ in reader)
    published = PublishedWeights.read(run.weights_of(version))
    return {
        "same": same, "senders": len(published.senders), "base": published.base is not None, **node.fetched,
        "size": published.size, "files": sorted(path.name for path in published.path.glob("*.safetensors")),
    }  # fmt: skip
