"""Hybrid sharding: ranks in several copies of a model sum their gradients once for each optimizer step, not for each micro-batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.errors import HpcrlError
from hpcrl.trainer.backends.fsdp.engine import FsdpCritic, FsdpEngine, FsdpPolicy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import pack
from hpcrl.types import MicroBatch
from tests.trainer import critic_scenarios
from tests.trainer.kernels.scenarios import stopped
from tests.trainer.material import make_sample, run_of_two
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import whole

MICRO_BATCHES = 3
SHARDING = {"fsdp_size": 2, "mixed_precision": {"param_dtype": "fp32"}}
Gradients = dict[str, torch.Tensor]


class _AllReduces(TorchDispatchMode):
    """Counts them. CommDebugMode would too, and fails at modules that are called in a forward that is not a module's."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.c10d.allreduce_.default
        return func(*args, **(kwargs or {}))


class _Interrupted(HpcrlError):
    pass


class _Cut:
    """Micro-batches of which the second cannot be taken."""

    def __init__(self, batches: list[MicroBatch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        yield self._batches[0]
        raise _Interrupted("a stop was asked for")


def _backward(engine: FsdpEngine[Any], batches: Any) -> tuple[int, Gradients]:
    """Return the all-reduces of the tensors of a pass, and its gradients, which are forgotten then."""
    with _AllReduces() as counted:
        engine.forward_backward(batches, lambda _, first_P, *_others: (first_P.square().sum(), {}))
    found = {name: whole(p.grad) for name, p in engine._model.named_parameters() if p.grad is not None}
    engine.skip()
    return counted.calls, found


def _difference(first: Gradients, second: Gradients) -> float:
    assert first.keys() == second.keys()
    return max(((first[name] - second[name]).norm() / second[name].norm()).item() for name in first)


def reduced(world: World, options: dict[str, Any]) -> None:
    """Tell how often each kind of engine all-reduces, with this and without, and how far its gradients are from those without."""
    sections = {name: {"fsdp_config": SHARDING} for name in ("policy", "critic")}
    trainer = critic_scenarios.section(options["model"], {"trainer": sections})
    found = dict[str, Any]()
    for engine in (FsdpPolicy(trainer, 1.0, world), FsdpCritic(trainer, world)):
        generator = torch.Generator().manual_seed(world.rank)
        batches = [pack([make_sample(generator, 12 + number, prompt=3)]).whole() for number in range(MICRO_BATCHES)]
        once, gradients = _backward(engine, batches)
        try:
            _backward(engine, _Cut(batches))
        except _Interrupted:
            engine.skip()
        after, again = _backward(engine, batches)
        with pytest.MonkeyPatch.context() as without:
            without.setattr(FSDPModule, "set_requires_all_reduce", lambda *_: None)
            each, expected = _backward(engine, batches)
        found[type(engine).__name__] = {
            "all_reduces": [once, after, each],
            "differences": [_difference(gradients, expected), _difference(again, expected)],
        }
    if world.first:
        Path(options["out"]).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), 4)
    yield ranks
    ranks.close()


def test_copies_sum_their_gradients_once_for_each_step(model_path: Path, tmp_path: Path, four: Ranks) -> None:
    """Also after a step that was stopped between two micro-batches, whose gradients are forgotten."""
    four.play([("backends.test_copies:reduced", {"model": str(model_path), "out": str(tmp_path / "found.json")})])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"FsdpPolicy", "FsdpCritic"}
    for name, of_engine in found.items():
        once, after, each = of_engine["all_reduces"]
        assert once == after > 0, name
        assert each == MICRO_BATCHES * once, name
        assert max(of_engine["differences"]) < 1e-5, name


def test_muon_moves_copies_alike_and_their_state_goes_on_elsewhere(
    model_path: Path, alone: World, tmp_path: Path, four: Ranks
) -> None:
    """Two copies of two ranks are as four ranks that share one, also from a checkpoint on; and so is one rank."""
    run = str(run_of_two(tmp_path / "run", 4, 3).path)

    def options(out: str, saved: str, fsdp: dict[str, Any], **more: Any) -> dict[str, Any]:
        policy = {"optimizer_config": {"name": "Muon", "lr": 2e-3}, "fsdp_config": fsdp}
        places = {"model": str(model_path), "run": run, "saved": str(tmp_path / saved), "out": str(tmp_path / out)}
        return {"trainer": {"policy": policy}, "micro": 4, **places, **more}

    copies, scenario = {"fsdp_size": 2}, "kernels.scenarios:stopped"
    four.play(
        [
            (scenario, options("shared", "of-shared", {})),
            (scenario, options("copies", "of-copies", copies)),
            (scenario, options("again", "of-copies", copies, restores=True)),
        ]
    )
    stopped(alone, options("alone", "of-copies", {}, restores=True))
    shared, *others = (json.loads((tmp_path / out).read_text()) for out in ("shared", "copies", "again", "alone"))
    for found in others:
        for name, near in (("final_loss", 1e-4), ("grad_norm", 1e-2)):
            assert [one[name] for one in found] == pytest.approx([one[name] for one in shared], abs=near, rel=near)
