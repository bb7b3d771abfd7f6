"""Sharding with FSDP2: its units, its device mesh and its types."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from hpcrl.config.sections.model import FSDPConfig
from hpcrl.data.vision.families import family_of
from hpcrl.errors import DataError, did_you_mean
from hpcrl.trainer.backends.base import MicroBatches
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.experts.parallel import expert_layers, share_experts
from hpcrl.trainer.models.forward import DTYPES
from hpcrl.trainer.models.logprobs import Head
from hpcrl.trainer.models.lora import read_from_outside
from hpcrl.types import MicroBatch


def shard(root: nn.Module, model: PreTrainedModel, fsdp: FSDPConfig, dtype: str, world: World) -> None:
    """Shard `root`, which holds `model` and uses its head itself. Where FSDP has nothing to do, parameters stay plain tensors.

    Args:
        dtype: that parameters are kept in.
    """
    inner = units(model, fsdp.wrap_policy)
    if not fsdp.is_needed(world.size, dtype, on_gpu=world.device.type == "cuda"):
        return
    size = _copy_ranks(root, fsdp, world)
    mesh = _mesh(size, world)
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[fsdp.mixed_precision.param_dtype], reduce_dtype=DTYPES[fsdp.mixed_precision.reduce_dtype]
    )
    offload = CPUOffloadPolicy() if fsdp.cpu_offload and mesh.device_type == "cuda" else OffloadPolicy()
    a_unit, kept = partial(fully_shard, mp_policy=precision, offload_policy=offload), fsdp.reshard_after_forward
    if fsdp.expert_parallel_size > 1:
        layers = expert_layers(model, fsdp.expert_parallel_size, size // fsdp.expert_parallel_size)
        together, with_same = _experts_meshes(size, fsdp.expert_parallel_size, world)
        for layer in layers:
            share_experts(layer, together)
            # a number of ranks that keep parameters is one of all ranks of a copy, which are more than have the same experts; scores of
            # experts stay in the type that the router gives them, as where experts are no unit
            a_unit(
                layer,
                mesh=with_same,
                reshard_after_forward=kept is not False,
                shard_placement_fn=_within_experts,
                mp_policy=replace(precision, cast_forward_inputs=False),
            )
        inner = [module for module in inner if module not in layers]
    for module in inner:
        a_unit(module, mesh=mesh, reshard_after_forward=kept)
    embedding, head = vocabulary_units(model, fsdp.wrap_policy)
    if embedding is not None:
        a_unit(embedding, mesh=mesh).set_unshard_in_backward(False)  # which needs no weight
    # backward starts with head and root, so freeing them after forward would only gather them twice
    if head is not None:
        a_unit(head, mesh=mesh, reshard_after_forward=False)
        register_fsdp_forward_method(head, Head.through.__name__)
    a_unit(root, mesh=mesh, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # losses arrive divided by the global token count: gradients of ranks are added. Sum is also all that gloo has.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _copy_ranks(root: nn.Module, fsdp: FSDPConfig, world: World) -> int:
    memory, on_node = None, int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.device.type == "cuda":
        memory = -world.max([-torch.cuda.get_device_properties(world.device).total_memory])[0]
    # of what is trained there are a gradient and two moments too
    state = sum(weight.nbytes * (4 if weight.requires_grad else 1) for weight in root.parameters())
    return fsdp.copy_ranks(world.size, on_node, state, memory)


def _mesh(size: int, world: World) -> DeviceMesh:
    kind = world.device.type
    if size == world.size:
        return DeviceMesh.from_group(world.tensors, kind) if world.tensors else init_device_mesh(kind, (size,))
    assert world.size % size == 0, f"{world.size} ranks cannot hold copies of {size} ranks each"
    # not init_device_mesh, whose groups have torch's own timeout
    shards = torch.tensor(dist.get_process_group_ranks(world.control)).view(-1, size)
    groups = [world.group_among(rows) for rows in (shards.T.tolist(), shards.tolist())]
    return DeviceMesh.from_group(groups, kind, shards, mesh_dim_names=("copies", "shards"))


def _experts_meshes(size: int, together: int, world: World) -> tuple[DeviceMesh, DeviceMesh]:
    """Return two parts of one mesh: the ranks that share experts, so many that follow one another, and those with the same experts, as `_mesh`."""
    every = torch.tensor(dist.get_process_group_ranks(world.control)).view(-1, size // together, together)
    rows = {
        "copies": every.flatten(1).T,
        "shards": every.transpose(1, 2).flatten(0, 1),
        "experts": every.flatten(0, 1),
    }
    if len(every) == 1:
        del rows["copies"]
        every = every[0]
    groups = [world.group_among(ranks.tolist()) for ranks in rows.values()]
    mesh = DeviceMesh.from_group(groups, world.device.type, every, mesh_dim_names=tuple(rows))
    return mesh["experts"], mesh[tuple(name for name in rows if name != "experts")]


def _within_experts(_: nn.Parameter) -> Shard:
    """Return the FSDP options of expert-parallel parameters: each rank's experts are sharded within each expert."""
    return Shard(1)


def one_copy(root: nn.Module, world: World) -> dist.ProcessGroup | None:
    """Return the ranks that together hold one copy of a sharded module; None: torch's own group, of all ranks."""
    parameter = next(root.parameters())
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return world.tensors if mesh is None or mesh.ndim == 1 else mesh.get_group("shards")


def accumulated(root: nn.Module, batches: MicroBatches, *, offloaded: bool) -> Iterator[MicroBatch]:
    """Yield the micro-batches of an optimizer step; copies of `root` all-reduce their gradients in backward of the last one only.

    Between them each copy adds up its own, in the type of the reduction. Every micro-batch gives the same parameters a gradient.

    Args:
        offloaded: gradients are kept in host memory, where they go after each micro-batch: sums would stay on the device.
    """
    if not isinstance(root, FSDPModule) or offloaded:
        yield from batches
        return
    number = 0
    try:
        for number, batch in enumerate(batches, 1):
            root.set_requires_all_reduce(number == len(batches))
            yield batch
    finally:
        if 0 < number < len(batches):
            root.reset_iter_state()  # the next step does not begin with sums of this one


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be sharded. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def set_whole(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set a sharded parameter from its whole value, which every rank has."""
    if isinstance(parameter, DTensor):  # nothing needs to be sent
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    local(parameter).copy_(local(value))


def copy_parameters(source: nn.Module, target: nn.Module, rate: float = 1.0) -> None:
    """Copy the parameters of `source` into those of `target` by name, across types and shardings.

    All ranks call it. One whole parameter, in the type of `target`, is in memory at a time; two where they are averaged.

    Args:
        rate: share of `source` in the new value; the rest is the old one.
    """
    values = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        value = whole(values[name].detach().to(parameter.dtype))
        set_whole(parameter, value if rate == 1 else torch.lerp(whole(parameter.detach()), value, rate))


def units(model: PreTrainedModel, wrap_policy: dict[str, Any]) -> list[nn.Module]:
    """Return the modules that are sharded as units, inner ones first: by default the decoder layers.

    Embedding and head are never in one, see `vocabulary_units`. Neither are layers that have parameters in common (Zamba), which FSDP wants
    in one unit.

    Args:
        wrap_policy: disable, or transformer_layer_cls_to_wrap, or min_num_params: each module is a unit that has so many
            parameters which are in no unit yet.

    Raises:
        DataError: a class is not in the model, holds embedding or head, or is that of experts with adapters.
    """
    if wrap_policy.get("disable"):
        return []
    root_only = {model.get_input_embeddings(), model.get_output_embeddings()}
    read_early = read_from_outside(model)

    def kept_out(module: nn.Module) -> bool:
        return module in read_early or any(inner in root_only for inner in module.modules())

    if "min_num_params" in wrap_policy:
        found: list[nn.Module] = []
        _by_size(model, wrap_policy["min_num_params"], kept_out, found)
        return found
    chosen = wrap_policy.get("transformer_layer_cls_to_wrap")
    classes, shared = set(chosen or model._no_split_modules or ()), _shared_parameters(model)
    found = [module for module in reversed(list(model.modules())) if type(module).__name__ in classes]
    there = {type(module).__name__ for module in model.modules()}
    for name in chosen or ():
        if name not in there:
            raise DataError(f"{_CLASSES}: the model has no {name}{did_you_mean(name, there, 3, 0.3)}")
    for module in found:
        if kept_out(module) or _is_container(module):
            near = "around" if module in read_early else "inside"
            raise DataError(f"{_CLASSES}: {type(module).__name__} cannot be a unit; name what lies {near} it")
    return [module for module in found if shared.isdisjoint(module.parameters())]


def vocabulary_units(model: PreTrainedModel, wrap_policy: dict[str, Any]) -> tuple[nn.Module | None, nn.Module | None]:
    """Return embedding and head as far as they are units of their own, each gathered while it is used and no longer; None: it is the root's.

    Where they are tied they are one parameter, which is needed first and last. A vision-language model has its embedding in the root.
    Ranks without an image call its tower before the embedding, those with one after it, and all have to gather in the same order. A head
    that gives something else than logits is small.

    Args:
        wrap_policy: as of `units`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if (
        not isinstance(embedding, nn.Embedding)
        or wrap_policy.get("disable")
        or embedding.weight in _shared_parameters(model)
    ):
        return None, None
    of_logits = head is not None and head.weight.shape == embedding.weight.shape
    return embedding if family_of(model.config) is None else None, head if of_logits else None


def _shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    once, several = set[nn.Parameter](), set[nn.Parameter]()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (several if parameter in once else once).add(parameter)
    return several


_CLASSES = "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"


def _by_size(module: nn.Module, least: int, kept_out: Callable[[nn.Module], bool], found: list[nn.Module]) -> int:
    """Append the units in `module` to `found`; return how many parameters are in none."""
    rest = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    rest += sum(_by_size(child, least, kept_out, found) for child in module.children())
    if rest < max(least, 1) or _is_container(module) or kept_out(module):
        return rest
    found.append(module)
    return 0


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
