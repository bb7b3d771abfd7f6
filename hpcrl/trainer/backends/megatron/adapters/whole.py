"""Whole adapters of a split model: merged weights, exports and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import nn

from hpcrl.trainer.backends.megatron.adapters.experts import of_all, stacked
from hpcrl.trainer.backends.megatron.adapters.layer import adapted_weights
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.names import EMBEDDING, hf_names, slots
from hpcrl.trainer.backends.megatron.weights import HEAD_NAME, export, export_pieces
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.adapter import Adapted


def merging(chunks: Sequence[nn.Module]) -> Callable[[nn.Parameter], torch.Tensor]:
    """Return a function that gives a parameter's values, merged with its adapter in float32 where it has one."""
    adapters = dict(adapted_weights(chunks))

    def values(parameter: nn.Parameter) -> torch.Tensor:
        weight = parameter.detach()
        return weight.float() + adapters[parameter].added(weight) if parameter in adapters else weight

    return values


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Compute without adapters for a while."""
    adapters = [adapter for _, adapter in adapted_weights(chunks)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def _matrix_name(letter: str, name: str) -> str:
    return f"{name}.lora_{letter}.weight"


def whole_adapters(
    chunks: Sequence[GPTModel], value: Callable[[nn.Parameter], torch.Tensor], world: World
) -> list[Adapted]:
    """Return the adapters by transformers' layers, whole, on the CPU of every rank. All ranks call it.

    Args:
        value: what is gathered of a rank's share of a matrix, of its shape and type: its data, or its gradient.
    """
    adapters = [adapter for _, adapter in adapted_weights(chunks)]
    layers = {name: [adapter.source[name], adapter.scaling[name]] for adapter in adapters for name in adapter.layers}
    here = {
        _matrix_name(letter, name): (value(matrix), adapter.axis(letter), adapter.group)
        for adapter in adapters
        for letter, name, matrix in adapter.matrices()
    }
    shapes = {name: _whole_shape(*share) for name, share in here.items()}
    everyones, whole = world.all_gather(lambda: [layers, shapes]), dict[str, torch.Tensor]()
    for rank, (_, shapes_there) in enumerate(everyones):
        for name in [name for name in shapes_there if name not in whole]:
            if name in here:
                found = _gathered(*here[name])
            else:
                dtype = chunks[0].config.params_dtype
                found = torch.empty(shapes_there[name], dtype=dtype, device=_device(chunks))
            if any(name not in others for _, others in everyones):  # only some pipeline stages have it
                dist.broadcast(found, rank)
            whole[name] = found.cpu()
    everywhere: dict[str, tuple[str, float]] = {name: layer for told, _ in everyones for name, layer in told.items()}
    return of_all(
        Adapted(
            name,
            whole[_matrix_name("A", source)].clone(),  # a file cannot have one tensor twice
            whole[_matrix_name("B", name)],
            scaling,
            f"{name}.weight",
        )
        for name, (source, scaling) in everywhere.items()
    )


def _device(chunks: Sequence[GPTModel]) -> torch.device:
    """Return where all ranks have their parameters: on their GPUs, or in host memory while engines use those."""
    return next(chunks[0].parameters()).device


def _whole_shape(share: torch.Tensor, axis: int | None, group: dist.ProcessGroup) -> list[int]:
    return [size * (group.size() if dim == axis else 1) for dim, size in enumerate(share.shape)]


def _gathered(share: torch.Tensor, axis: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    if axis is None or group.size() == 1:
        return share.clone()
    share = share.contiguous()
    shares = [torch.empty_like(share) for _ in range(group.size())]
    dist.all_gather(shares, share, group=group)
    return torch.cat(shares, axis)


def whole_modules(
    chunks: Sequence[GPTModel], architecture: Architecture, dtype: torch.dtype, world: World
) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained whole beside adapters, by transformers' name, on the CPU of every rank. All ranks call it."""
    own = [names for parameter, names in hf_names(chunks, architecture).items() if parameter.requires_grad]
    everyones = world.all_gather(lambda: [name for names in own for name in names])
    trained = {name for names in everyones for name in names}
    pieces, whole = export_pieces(chunks, architecture, dtype, world, trained), dict[str, torch.Tensor]()
    owners = [piece.ranks[0] for piece in pieces]
    exported = export(chunks, architecture, torch.Tensor.detach, dtype, owners, trained)
    for piece, found, owner in zip(pieces, exported, owners, strict=True):
        for name, empty in piece.tensors.items():
            value = found[name] if name in found else torch.empty_like(empty, device="cpu")
            value = value.to(_device(chunks)).contiguous()
            dist.broadcast(value, owner)
            whole[name] = value.cpu()
    (embedding,) = slots(architecture)[EMBEDDING].tensors
    if architecture.tied and embedding in whole:  # PEFT ties no modules that it keeps whole: each has its own
        whole[HEAD_NAME] = whole[embedding].clone()
    return stacked(whole)
