"""Measures the tensors that the backward pass of any model keeps, by a forward pass on the meta device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode


def kept_bytes(model: torch.nn.Module, forward: Callable[[], object], *, recomputed: bool) -> int:
    """Return the bytes of activations that are kept until backward.

    Args:
        model: on the meta device; what is trained of it has gradients.
        forward: computes the loss, or what it is computed of.
        recomputed: each of the model's blocks keeps what it is given, and is computed again in backward.
    """
    blocks = _blocks(model)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages, given, inside = defaultdict[int, dict[int, Any]](dict), dict[int, int](), [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[inside[0]][storage._cdata] = storage  # alive, so that no other one gets its place
        return tensor

    with _watched(blocks, inside, given), saved_tensors_hooks(keep, lambda tensor: tensor), _FusedAttention():
        forward()
    of_block = {
        number: sum(storage.nbytes() for storage in kept.values()) for number, kept in storages.items() if number
    }
    outside = sum(storage.nbytes() for storage in storages[0].values())
    if recomputed:
        return outside + sum(given.values()) + max(of_block.values(), default=0)
    every = {place: storage.nbytes() for kept in storages.values() for place, storage in kept.items()}
    return sum(every.values())


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that are alike: the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


@contextmanager
def _watched(blocks: Sequence[torch.nn.Module], inside: list[int], given: dict[int, int]) -> Iterator[None]:
    """Note which block computes, from 1, and the bytes that each is given."""

    def enter(number: int) -> Callable[..., None]:
        def noted(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            inside[0] = number
            tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
            given[number] = sum(each.nbytes for each in tensors if each.requires_grad)

        return noted

    def leave(*_: object) -> None:
        inside[0] = 0

    hooks = [block.register_forward_pre_hook(enter(at), with_kwargs=True) for at, block in enumerate(blocks, 1)]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _FusedAttention(TorchFunctionMode):
    """Keeps of attention what fused kernels do: inputs and output. Without a device torch chooses the one that keeps all scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs or {})
            return _Attention.apply(named["query"], named["key"], named["value"])
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        return ctx.saved_tensors[:3]
