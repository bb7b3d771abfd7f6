"""Expert parallelism: tokens are sent to the ranks of their experts, and the results are sent back.

Of R ranks that follow one another, rank r has E / R experts of each layer, those from r E / R on. A rank sorts its (token, expert) pairs
by expert, so that those for one rank are contiguous. Ranks then exchange them in an all-to-all of unequal sizes (as GShard,
arXiv:2006.16668, section 3.2, but without a capacity: no token is dropped). Scores are multiplied in where tokens come from, so that only
hidden states travel.

    [N, D]  --sort, all-to-all-->  [G, D]  --experts-->  [G, D]  --all-to-all, sort back-->  [N, k, D]  --scores-->  [N, D]

The gradient takes the same way back: that of an expert is summed over the tokens of all R ranks.

Letters beside those of the project: N tokens of a rank, k experts of each, S pairs of both, G pairs that come to a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from hpcrl.errors import DataError

_uncompiled: Any = torch.compiler.disable
_Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def expert_layers(model: nn.Module, ranks: int, shards: int = 1) -> list[nn.Module]:
    """Return the modules that have all experts of a layer, each parameter as one tensor [E, ...], where so many ranks can share them.

    Args:
        shards: ranks that shard each part of the experts, by the second dimension.

    Raises:
        DataError: the model has none, or so many ranks cannot share them.
    """
    path, kind = "fsdp_config.expert_parallel_size", type(model).__name__
    found = [module for module in model.modules() if "is_transposed" in vars(module)]  # as transformers marks them
    if not found:
        raise DataError(f"{path}: {kind} has no experts that transformers holds in one tensor for each layer; use 1")
    for layer in found:
        count: Any = layer.num_experts
        if count % ranks:
            raise DataError(f"{path}: {ranks} ranks cannot share the {count} experts of {kind} equally; use a divisor")
        if any(parameter.shape[0] != count for parameter in layer.parameters()):
            raise DataError(f"{path}: {kind} has experts whose parameters are not one tensor each; use 1")
        if uneven := [parameter.shape[1] for parameter in layer.parameters() if parameter.shape[1] % shards]:
            raise DataError(
                f"{path}: with {ranks}, {shards} ranks shard the {uneven[0]} rows of each expert of {kind}, which they cannot equally; use more, "
                "or set fsdp_config.fsdp_size to fewer ranks"
            )
    return found


def share_experts(layer: nn.Module, ranks: DeviceMesh) -> None:
    """Leave this rank its part of the experts of a layer, whose forward is from now on that of all ranks together.

    Args:
        layer: of `expert_layers`, on the meta device.
        ranks: of one dimension.
    """
    for name, parameter in list(layer.named_parameters(recurse=False)):
        own = parameter.detach().chunk(ranks.size())[ranks.get_local_rank()]
        held = DTensor.from_local(own, ranks, [Shard(0)], run_check=False)
        layer.register_parameter(name, nn.Parameter(held, requires_grad=parameter.requires_grad))
    count: Any = layer.num_experts
    layer.num_experts = count // ranks.size()
    layer.forward = partial(_exchanged, layer, ranks.get_group(), layer.forward)


@_uncompiled
def _exchanged(
    layer: Any,
    ranks: dist.ProcessGroup,
    compute: _Experts,
    hidden_ND: torch.Tensor,
    experts_Nk: torch.Tensor,
    scores_Nk: torch.Tensor,
) -> torch.Tensor:
    size, own, chosen = ranks.size(), layer.num_experts, experts_Nk.shape[1]
    experts_S = experts_Nk.flatten()
    order_S = experts_S.argsort(stable=True)
    sent_E = experts_S.bincount(minlength=size * own)
    got_E = torch.empty_like(sent_E)  # for this rank's experts, of one rank after the other
    dist.all_to_all_single(got_E, sent_E, group=ranks)
    sent, got = torch.stack([sent_E, got_E]).view(2, size, own).sum(-1).tolist()
    numbers_G = torch.arange(own, device=got_E.device).repeat(size).repeat_interleave(got_E, output_size=sum(got))
    found_GD = _computed(layer, compute, exchange(hidden_ND[order_S // chosen], sent, got, ranks), numbers_G)
    back_SD = exchange(found_GD, got, sent, ranks)[order_S.argsort()]
    return (back_SD.unflatten(0, (-1, chosen)) * scores_Nk.unsqueeze(-1)).sum(1).to(hidden_ND.dtype)


def _computed(layer: nn.Module, compute: _Experts, hidden_GD: torch.Tensor, numbers_G: torch.Tensor) -> torch.Tensor:
    count = len(hidden_GD)
    if not count:  # the experts get a gradient, of 0, all the same: FSDP reduces it with those of other ranks
        hidden_GD, numbers_G = pad(hidden_GD, (0, 0, 0, 1)), numbers_G.new_zeros(1)
    with _own(layer):
        found_GD = compute(hidden_GD, numbers_G[:, None], hidden_GD.new_ones(len(hidden_GD), 1))
    return found_GD[:count]


@contextmanager
def _own(layer: nn.Module) -> Iterator[None]:
    """Replace a layer's parameters by plain tensors of this rank for a while, under the same names."""
    held: dict[str, Any] = dict(layer.named_parameters(recurse=False))
    found = {name: value.to_local() for name, value in held.items()}
    vars(layer).update(found)
    try:
        yield
    finally:
        for name in found:
            del vars(layer)[name]


def exchange(values_SD: torch.Tensor, sent: list[int], got: list[int], ranks: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows that the ranks have for this one, in their order. All ranks call it.

    Args:
        values_SD: rows for the ranks, in their order.
        sent, got: how many for, and from, each.
    """
    found: Any = _Exchange.apply(values_SD, sent, got, ranks)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values_SD: torch.Tensor, sent: list[int], got: list[int], ranks: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.got, ctx.ranks = sent, got, ranks
        return _sent(values_SD, sent, got, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_GD: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sent(gradient_GD, ctx.got, ctx.sent, ctx.ranks), None, None, None


def _sent(values_SD: torch.Tensor, sent: list[int], got: list[int], ranks: dist.ProcessGroup) -> torch.Tensor:
    found_GD = values_SD.new_empty(sum(got), *values_SD.shape[1:])
    dist.all_to_all_single(found_GD, values_SD.contiguous(), got, sent, group=ranks)
    return found_GD
