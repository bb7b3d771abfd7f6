"""Checkpoint state of a Megatron-core model, in the format of hpcrl/trainer/backends/shards.py, independent of the layout.

Each rank has what its optimizer steps: with Megatron-core's distributed optimizer stretches of parameters, and of a bf16 model their fp32 copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from hpcrl.trainer.backends.base import Writer
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.muon import MOMENTUM
from hpcrl.trainer.backends.megatron.names import name_over_all
from hpcrl.trainer.backends.megatron.shard_layout import shard_layout
from hpcrl.trainer.backends.shards import PREFIX, LocalShards, Shard, read, write
from hpcrl.trainer.distributed import World

_MOMENTS = ("exp_avg", "exp_avg_sq", MOMENTUM)
_Stretch = tuple[nn.Parameter, str, torch.Tensor, int]
"""A range of a parameter: parameter, kind ("model" or a moment), its numbers [n], and their offset in the flattened parameter."""


@dataclass(frozen=True)
class _Stepped:
    """Optimizer state of a parameter on this rank.

    Attributes:
        optimizer: Megatron-core's.
        group: Adam's settings of the parameter.
        state: Adam's state of it, or Muon's.
        first: where the stretch begins in the parameter.
        tensors: param of the stretch, with exp_avg and exp_avg_sq, or with the momentum of Muon.
    """

    optimizer: Any
    group: dict[str, Any]
    state: dict[str, torch.Tensor]
    first: int
    tensors: dict[str, torch.Tensor]

    @property
    def counts(self) -> bool:
        """Whether steps of the parameter are counted: not those of Muon."""
        return MOMENTUM not in self.state

    @property
    def count(self) -> float:
        """Steps of Adam: TransformerEngine's has one count for all."""
        return float(self.state["step"] if "step" in self.state else self.group.get("step", 0))

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, count: float) -> None:
        """Copy loaded values into the optimizer."""
        if isinstance(
            self.optimizer, DistributedOptimizer
        ):  # tensors are copies where it keeps them in types of fewer bits
            self.optimizer._set_main_param_and_optimizer_states(parameter, self.tensors)
        if "step" in self.state:
            self.state["step"].fill_(count)
        elif self.counts:
            self.group["step"] = int(count)


class ShardedState:
    """Checkpoint state of one model: weights and, if it is trained, optimizer state and optimizer steps.

    Args:
        chunks: bare, of this rank.
        optimizer: Megatron-core's; None: the model is not trained.
        adapted: the model has adapters, and what lies below them is not saved.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        architecture: Architecture,
        optimizer: Any,
        world: World,
        *,
        adapted: bool = False,
    ) -> None:
        self._chunks, self._optimizer, self._world = list(chunks), optimizer, world
        self._places = {
            parameter: found
            for parameter, found in shard_layout(chunks, architecture).items()
            if parameter.requires_grad or not adapted
        }

    def stepped(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's tensors that the optimizer steps, and their moments, which are made where it has not stepped."""
        optimizers = [each for each in self._optimizer.chained_optimizers if each.optimizer is not None]
        for optimizer in optimizers:
            _begin(optimizer)
        groups = [group for each in optimizers for group in each.optimizer.param_groups]
        states = [state for each in optimizers for state in each.optimizer.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [parameter for group in groups for parameter in group["params"]], moments

    def writer(self, updates: int, *, copied: bool) -> Writer:
        """Return the writer of the state.

        Args:
            updates: optimizer steps done.
            copied: to host memory, now; otherwise the state must not change until it is written.
        """
        stepped = self._stepped()
        frozen = [part for part in self._parameters() if self._optimizer is None or not part[0].requires_grad]
        state: dict[str, torch.Tensor] = self._local_shards([*frozen, *_stretches(stepped)], written=True)
        for parameter, found in stepped.items():
            for place in self._places[parameter]:
                if self._key(place.name, _MOMENTS[0]) in state:
                    state[self._key(place.name, "step")] = torch.tensor(found.count)
        if self._optimizer is not None:
            state |= {"updates": torch.tensor(updates), **self._buffers()}
        if copied:
            state = {
                name: each.copied() if isinstance(each, LocalShards) else each.clone() for name, each in state.items()
            }
        return partial(write, state)

    def load(self, directory: Path) -> int:
        """Load a state that any backend wrote; return its optimizer steps. All ranks call it."""
        stepped, updates = self._stepped(), torch.tensor(0)
        counted = [parameter for parameter, found in stepped.items() if found.counts]
        keys = {parameter: self._key(self._places[parameter][0].name, "step") for parameter in counted}
        counts = {key: torch.tensor(0.0) for key in keys.values()}  # experts have one together
        shards = self._local_shards([*self._parameters(), *_stretches(stepped)])
        read(shards | counts | {"updates": updates}, directory, self._world)
        for parameter, found in stepped.items():
            found.take(parameter, counts[keys[parameter]].item() if found.counts else 0)
        if self._chunks[0].config.moe_router_enable_expert_bias:  # FSDP2 does not have it
            read(self._buffers(), directory, self._world, partly=True)
        return int(updates)

    def load_weights(self, directory: Path) -> None:
        """Load only the model of a state that any backend wrote. All ranks call it."""
        read(self._local_shards(self._parameters()), directory, self._world)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def _parameters(self) -> list[_Stretch]:
        return [(parameter, "model", parameter.detach().view(-1), 0) for parameter in self._places]

    def _local_shards(self, stretches: Sequence[_Stretch], *, written: bool = False) -> dict[str, Any]:
        """Return the tensors of which this rank has shards, by their names in a checkpoint.

        Args:
            written: leave out shards that another rank writes.
        """
        by_name, shapes = dict[str, list[Shard]](), dict[str, tuple[int, ...]]()
        for parameter, what, values, first in stretches:
            for place in self._places[parameter]:
                shards = [] if written and place.copy else list(place.shards(values, first))
                if shards:
                    key = self._key(place.name, what)
                    by_name.setdefault(key, []).extend(shards)
                    shapes[key] = place.shape
        return {key: LocalShards.of(shapes[key], shards) for key, shards in by_name.items()}

    def _key(self, name: str, what: str) -> str:
        if what != "model":
            return f"optimizer.state.{PREFIX}{name}.{what}"
        return f"{PREFIX}{name}" if self._optimizer is None else f"model.{PREFIX}{name}"

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return buffers that are saved though not trained: the expert bias of routers."""
        return {
            f"buffers.{name_over_all(chunk, name)}": buffer
            for chunk in self._chunks
            for kept in [chunk.state_dict().keys()]
            for name, buffer in chunk.named_buffers()
            if name in kept
        }

    def _stepped(self) -> dict[nn.Parameter, _Stepped]:
        owners = {getattr(each, "main_param", each): each for each in self._places if each.requires_grad}
        found = dict[nn.Parameter, _Stepped]()
        optimizers = () if self._optimizer is None else self._optimizer.chained_optimizers
        for optimizer in [
            each for each in optimizers if each.optimizer is not None
        ]:  # None: on a stage of which nothing is trained
            _begin(optimizer)
            groups, states = optimizer.optimizer.param_groups, optimizer.optimizer.state
            if isinstance(optimizer, DistributedOptimizer):
                for parameter, (number, place) in optimizer.model_param_group_index_map.items():
                    first = optimizer._get_model_param_range_map(parameter)["param"].start
                    tensors: Any = optimizer._get_main_param_and_optimizer_states(parameter)
                    state = states[groups[number]["params"][place]]
                    found[parameter] = _Stepped(optimizer, groups[number], state, first, tensors)
                continue
            for group in groups:
                for main in group["params"]:
                    tensors = {"param": main, **states[main]}
                    found[owners[main]] = _Stepped(optimizer, group, states[main], 0, tensors)
        return found


def _stretches(stepped: Mapping[nn.Parameter, _Stepped]) -> Iterator[_Stretch]:
    for parameter, found in stepped.items():
        moments = [name for name in _MOMENTS if name in found.tensors]
        for name, what in (("param", "model"), *zip(moments, moments, strict=True)):
            yield parameter, what, found.tensors[name].detach().view(-1), found.first


def _begin(optimizer: Any) -> None:
    """Make the state of parameters that have none: those of Muon have theirs."""
    adam = optimizer.optimizer
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    without = [parameter for parameter in parameters if not adam.state[parameter]]
    if not without:
        return
    if isinstance(adam, torch.optim.Adam):
        for parameter in without:
            zero = torch.zeros_like(parameter.data)
            adam.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": zero, "exp_avg_sq": zero.clone()}
        return
    rates = [group["lr"] for group in adam.param_groups]
    for group in adam.param_groups:
        group["lr"] = 0.0
    for parameter in (each for each in without if each.numel()):  # by a step without gradients, which it counts
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    adam.zero_grad()
    for group, rate in zip(adam.param_groups, rates, strict=True):
        group |= {"lr": rate, "step": 0}
