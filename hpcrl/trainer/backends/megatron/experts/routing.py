"""Megatron-core's routers in training and scoring: losses, metrics and replayed choices, as on FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.errors import DataError
from hpcrl.trainer.backends.megatron.packed import Packing, RoutedTokens
from hpcrl.trainer.backends.megatron.process_groups import context_group, tensor_group
from hpcrl.trainer.models.experts.balance import Balance, Samples
from hpcrl.trainer.models.experts.replay import Chosen, given_experts
from hpcrl.types import MicroBatch

# 0.16.1 binds the name with TransformerEngine only, and every router reads it
if not hasattr(moe_utils, "te_general_gemm"):
    setattr(moe_utils, "te_general_gemm", None)  # noqa: B010 - pyright knows no such attribute


class MegatronRouting:
    """The routers of this rank's chunks.

    A layer is computed with the Packing of its micro-batch, also in recomputation while others are on their way forward. So its router
    finds its inputs there.

    Args:
        data_ranks: that train different samples.

    Attributes:
        balance: losses and metrics of this rank's layers.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: ExpertsConfig, data_ranks: int) -> None:
        model: Any = chunks[0].config
        numbers = _numbers(model)
        _require(model, config)
        experts, drops = model.num_moe_experts or 0, model.moe_expert_capacity_factor is not None
        self.balance = Balance(config, len(numbers), experts, model.moe_router_topk, drops=drops)
        self._numbers = [number - 1 for number in numbers]
        self._replays = config.router_replay != "none"
        # Megatron-core averages gradients over these
        self._scale = float(data_ranks * context_group().size())
        self._current: Packing | None = None
        for chunk in chunks:
            for layer in chunk.modules():
                if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoELayer):
                    layer.register_forward_pre_hook(self._before, with_kwargs=True)
                    router: Any = layer.mlp.router
                    router.routing = partial(self._routed, numbers.index(layer.layer_number), router.routing)

    def tokens(self, batch: MicroBatch, packing: Packing, *, trained: bool) -> RoutedTokens | None:
        """Return the router inputs of a micro-batch; None: routers are unchanged.

        Args:
            batch: on the device.
        """
        if not self.balance.layers:
            return None
        given_P = given_experts(batch, self._numbers) if self._replays else None
        # what is shared has 0 for padding, so that there everything is 1 more
        given = None if given_P is None else _own(packing.share(given_P + 1)) - 1
        if not (trained and batch.share):
            return RoutedTokens(given, None)
        lengths_B = batch.cu_seqlens.diff()
        count, total = len(batch.lengths), len(batch.token_ids)
        numbers_B = torch.arange(1, count + 1, device=lengths_B.device)
        owners_N = _own(packing.share(numbers_B.repeat_interleave(lengths_B, output_size=total)))
        owners_N = torch.where(owners_N == 0, count, owners_N - 1)
        group: Any = parallel_state.get_tensor_and_context_parallel_group()
        return RoutedTokens(given, Samples(owners_N, lengths_B.float(), batch.share, group=group))

    def _before(self, _layer: nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
        self._current = named["packed_seq_params"]

    def _routed(
        self, layer: int, routing: Callable[..., tuple[torch.Tensor, torch.Tensor]], logits: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self._current.routed if self._current is not None else None
        if tokens is None:
            return routing(logits, **named)
        given_Nk = None if tokens.given is None else tokens.given[:, layer]
        with nullcontext() if given_Nk is None else Chosen(given_Nk):
            scores_NE, map_NE = routing(logits, **named)
        if tokens.samples is None or not torch.is_grad_enabled():  # it will be computed again, with a gradient
            return scores_NE, map_NE
        logits_NE, chosen_NE = logits.flatten(0, 1), map_NE.float()
        scores_NE = self.balance.with_loss(
            layer, scores_NE, logits_NE, chosen_NE, tokens.samples, given_Nk=given_Nk, scale=self._scale, told=True
        )
        return scores_NE, map_NE


def _own(values: torch.Tensor) -> torch.Tensor:
    """Return the part of a rank of tensor parallelism, whose layers share tokens with the others."""
    group = tensor_group()
    return values.chunk(group.size())[group.rank()]


def _require(model: TransformerConfig, config: ExpertsConfig) -> None:
    wanted = [name for name, value in vars(config).items() if value not in (0, "none")]
    if not wanted:
        return
    path, kwargs = f"trainer.policy.experts.{wanted[0]}", "trainer.policy.megatron_config.transformer_config_kwargs"
    if not model.num_moe_experts:
        raise DataError(f"{path}: the model has no experts; leave it out")
    if _forgets(model):
        raise DataError(
            f"{path}: {kwargs}.recompute_modules has moe, whose routers would take other tokens for these; leave that out"
        )
    if config.router_replay != "none" and (
        model.moe_router_fusion or model.moe_router_load_balancing_type == "sinkhorn"
    ):
        raise DataError(
            f"trainer.policy.experts.router_replay: choices are repeated in a topk, which neither {kwargs}.moe_router_fusion nor sinkhorn has; leave these out"
        )


def _forgets(model: TransformerConfig) -> bool:
    """Return whether routers are recomputed without the layers around them, whose packing they need."""
    return model.recompute_granularity == "selective" and "moe" in (model.recompute_modules or ())


def _numbers(config: TransformerConfig) -> list[int]:
    """Return the numbers of the layers with losses, metrics or replay, from 1."""
    if not config.num_moe_experts or _forgets(config):
        return []
    every = config.moe_layer_freq
    layers = range(config.num_layers)
    marked = every if isinstance(every, list) else [int(layer % every == 0) for layer in layers]
    return [layer + 1 for layer in layers if marked[layer]]
