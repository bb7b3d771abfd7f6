"""What leaves a device for an engine's turn has the same host memory each time, which asynchronous checkpoints then find again.

On CPUs an engine leaves its state where it is; here it is moved all the same, from one place of host memory to another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary

from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.backends.fsdp.host_state import HostState
from hpcrl.trainer.backends.fsdp.sharding import local
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import pack
from tests.trainer.material import make_sample
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import make_engine


def _state(engine: FsdpPolicy) -> dict[str, torch.Tensor]:
    """Return weights and moments by name, this rank's part of each."""
    parameters = dict(engine._model.named_parameters())
    moments = {
        f"{name}.{key}": value
        for name, each in parameters.items()
        for key, value in engine._optimizer.state[each].items()
    }
    return {name: local(value.detach()) for name, value in (parameters | moments).items()}


def _step(engine: FsdpPolicy, seed: int) -> None:
    batch = pack([make_sample(torch.Generator().manual_seed(seed), 12, prompt=3)]).whole()
    engine.forward_backward([batch], lambda _, first_P, *_others: (first_P.square().sum(), {}))
    engine.step()


def turned(world: World, options: dict[str, Any]) -> None:
    """Take two turns, and tell what stayed the same."""
    engine, still = (make_engine(world, options["model"], options) for _ in range(2))
    pointers, equal = list[dict[str, int]](), list[bool]()
    for turn in range(3):
        for each in (engine, still):
            _step(each, turn)
        before = {name: value.data_ptr() for name, value in _state(engine).items()}
        engine._host_state.take(engine._models(), engine._optimizer)
        away = _state(engine)
        pointers.append({name: value.data_ptr() for name, value in away.items()})
        moved = all(pointers[-1][name] != before[name] for name in before)
        engine._host_state.give_back()
        equal.append(moved and all(torch.equal(value, _state(still)[name]) for name, value in away.items()))
        equal.append(all(torch.equal(value, _state(still)[name]) for name, value in _state(engine).items()))
    padded = {name for name, value in pointers[0].items() if pointers[1][name] != value}
    told = {"equal": equal, "same": pointers[1].keys() - padded == pointers[2].keys() - padded, "moved": sorted(padded)}
    told["count"] = len(pointers[0])
    Path(f"{options['out']}.{world.rank}").write_text(json.dumps(told))


FSDP = {"policy": {"fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}}}


@pytest.mark.parametrize("trainer", [{}, FSDP], ids=["plain tensors", "FSDP2"])
def test_each_turn_has_the_buffers_of_the_first_one(
    model_path: Path, tmp_path: Path, alone: World, trainer: dict[str, Any]
) -> None:
    turned(alone, {"model": str(model_path), "out": str(tmp_path / "told"), "trainer": trainer})
    told = json.loads((tmp_path / "told.0").read_text())
    assert told["equal"] == [True] * 6
    assert told["moved"] == []
    assert told["count"] > 40


def test_two_ranks_keep_buffers_of_what_is_sharded_evenly(model_path: Path, tmp_path: Path, two: Ranks) -> None:
    two.play([("backends.test_host_state:turned", {"model": str(model_path), "out": str(tmp_path / "told")})])
    for rank in range(2):
        told = json.loads((tmp_path / f"told.{rank}").read_text())
        assert told["equal"] == [True] * 6
        assert told["moved"] == [], "no parameter of this model is padded"


def test_parameters_in_host_memory_have_no_buffers(model_path: Path, alone: World) -> None:
    """As with cpu_offload on a GPU."""
    engine = make_engine(alone, str(model_path), {})
    _step(engine, 1)
    before = {name: value.data_ptr() for name, value in _state(engine).items()}
    state = HostState(torch.device("cuda"))
    state.take(engine._models(), engine._optimizer)
    state.give_back()
    assert state._buffers == {}
    assert {name: value.data_ptr() for name, value in _state(engine).items()} == before


class _Counted(WeakIdKeyDictionary):
    """A cache that counts what was not in it."""

    misses = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        type(self).misses += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("trainer", [{}, FSDP], ids=["plain tensors", "FSDP2"])
def test_an_asynchronous_checkpoint_finds_its_copies_again(
    model_path: Path, alone: World, trainer: dict[str, Any]
) -> None:
    """Of a state that left the device before each save; only the count of optimizer steps is a tensor of its own each time."""
    engine, misses = make_engine(alone, str(model_path), {"trainer": trainer}), list[int]()
    for turn in range(3):
        _step(engine, turn)
        engine._host_state.take(engine._models(), engine._optimizer)
        _Counted.misses = 0
        engine.snapshot()
        misses.append(_Counted.misses)
        if turn == 0:
            stager: Any = engine._stager
            known = stager[1]._state_dict_stager
            counted = _Counted()
            counted.update(known._cached_storage_mapping)
            known._cached_storage_mapping = counted
        engine._host_state.give_back()
    assert misses[1:] == [1, 1]
