"""Routers of a transformers model in training and scoring: losses, metrics and replayed choices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.data.models.routers import routers
from hpcrl.errors import DataError
from hpcrl.trainer.models.experts.balance import Balance, Samples
from hpcrl.trainer.models.experts.replay import Chosen, given_experts
from hpcrl.trainer.models.packed.attention import Packed, PackedSequences
from hpcrl.trainer.models.packed.sequence_parallel import SharedTokens
from hpcrl.types import MicroBatch

_uncompiled: Any = torch.compiler.disable
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass
class _Pass:
    """One micro-batch on its way through the model, and back; recomputation repeats its inputs.

    Attributes:
        given: [N, L, k] int64, as of `given_experts`, in the order in which routers see the tokens.
        samples: None where nothing is learned of routers: in passes without gradient, and of micro-batches without samples.
        scale: of the gradient.
        forward: it is on its way there.
    """

    given: torch.Tensor | None
    samples: Samples | None
    scale: float
    forward: bool = True


class Routing:
    """The routers of a model.

    Args:
        model: on the meta device; where it is no mixture of experts, nothing is done here.
        config: None: routers are unchanged, without losses and metrics.
        packing: samples lie end to end; otherwise each is a padded row.

    Attributes:
        balance: losses and metrics of the routers.

    Raises:
        DataError: its routers cannot do what the configuration asks for.
    """

    def __init__(self, model: PreTrainedModel, config: ExpertsConfig | None, *, packing: bool) -> None:
        named = {} if config is None else routers(model)
        found = list(named.values())
        config = config or ExpertsConfig()
        _require(model, found, config)
        experts, chosen = (len(_weight(found[0])), _chosen(model)) if found else (0, 0)
        self.balance = Balance(config, len(found), experts, chosen)
        self._replays, self._packing = config.router_replay != "none", packing
        self._numbers = [int(match[1]) for name in named if (match := _LAYER.search(name))]
        self._pass: _Pass | None = None
        for layer, router in enumerate(found):
            # not a hook: the experts of a token must be known while the router computes
            router.forward = partial(self._routed, layer, router.forward)

    @contextmanager
    def during(self, batch: MicroBatch, sequences: Packed, scale: float | None) -> Iterator[None]:
        """Set the micro-batch of the routers, for forward and backward.

        Args:
            batch: on the model's device.
            scale: of the loss that is differentiated; None: none is.
        """
        if not self.balance.layers:
            yield
            return
        learned = scale is not None and batch.share > 0
        samples = self._samples(batch, sequences) if learned else None
        self._pass = _Pass(self._given(batch, sequences), samples, scale or 0.0)
        try:
            yield
        finally:
            self._pass = None

    def turn_back(self) -> None:
        """Mark the end of the forward pass: later calls are recomputation."""
        if self._pass is not None:
            self._pass.forward = False

    def _given(self, batch: MicroBatch, sequences: Packed) -> torch.Tensor | None:
        given_P = given_experts(batch, self._numbers) if self._replays else None
        if given_P is None or self._packing:
            return None if given_P is None else sequences.computed(given_P)
        assert isinstance(sequences, PackedSequences)
        return sequences.rows(given_P).flatten(0, 1)

    def _samples(self, batch: MicroBatch, sequences: Packed) -> Samples:
        lengths_B = batch.cu_seqlens.diff()
        count, total = len(batch.lengths), sum(batch.lengths)
        owners_P = torch.arange(count, device=lengths_B.device).repeat_interleave(lengths_B, output_size=total)

        def flat(values_N: torch.Tensor) -> torch.Tensor:
            assert isinstance(sequences, PackedSequences)
            return sequences.flat(values_N.unflatten(0, (count, sequences.max_seqlen)))

        spread = sequences.spread if self._packing else flat
        shared = sequences.ranks if isinstance(sequences, SharedTokens) else None
        return Samples(owners_P, lengths_B.float(), batch.share, spread, shared)

    @_uncompiled
    def _routed(
        self, layer: int, forward: Callable[..., tuple[torch.Tensor, ...]], *inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        current = self._pass
        if current is None:
            return forward(*inputs)
        given_Nk = None if current.given is None else current.given[:, layer]
        with nullcontext() if given_Nk is None else Chosen(given_Nk):
            logits_NE, scores_Nk, experts_Nk = forward(*inputs)
        if current.samples is not None:
            chosen_NE = torch.zeros_like(logits_NE, dtype=torch.float32).scatter_(1, experts_Nk, 1.0)
            scores_Nk = self.balance.with_loss(
                layer, scores_Nk, logits_NE, chosen_NE, current.samples,
                given_Nk=given_Nk, scale=current.scale, told=current.forward,
            )  # fmt: skip
        return logits_NE, scores_Nk, experts_Nk


def _weight(router: nn.Module) -> torch.Tensor:
    """Return a router's matrix, [E, D]."""
    weight = router.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _chosen(model: PreTrainedModel) -> int:
    return model.config.get_text_config().num_experts_per_tok


def _require(model: PreTrainedModel, found: list[nn.Module], config: ExpertsConfig) -> None:
    wanted = [name for name, value in vars(config).items() if value not in (0, "none")]
    if not wanted:
        return
    section, kind = "trainer.policy.experts", type(model).__name__
    if not found:
        raise DataError(f"{section}.{wanted[0]}: {kind} has no routers known to transformers; leave it out")
    if config.aux_loss_coef and any("correction_bias" in name for name in model.state_dict()):
        raise DataError(f"{section}.aux_loss_coef: {kind} balances its experts by a bias, not by a loss; use 0")
    if config.router_replay != "none" and not all(_repeats(router, _chosen(model)) for router in found):
        raise DataError(
            f"{section}.router_replay: routers of {kind} choose by something else than one topk, and cannot repeat choices; leave it out"
        )


def _repeats(router: nn.Module, count: int) -> bool:
    """Return whether a router, on the meta device, chooses its experts by one topk, whose result is what it returns."""
    weight = _weight(router)
    given = torch.zeros(2, count, dtype=torch.int64, device=weight.device)
    hidden, *biases = signature(router.forward).parameters  # some are given the bias that balances experts
    inputs = {hidden: weight.new_zeros(2, weight.shape[1]), **{name: weight.new_zeros(len(weight)) for name in biases}}
    with torch.no_grad(), Chosen(given) as chosen:
        *_, experts = router(**inputs)
    return chosen.calls == 1 and experts.shape == given.shape
