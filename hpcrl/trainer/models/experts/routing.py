"""The routers of a mixture of experts in training: what they cost, what they tell, and the choices of the engine that they repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.data.models.routers import routers
from hpcrl.errors import DataError
from hpcrl.trainer.models.attention import Packed, PackedSequences
from hpcrl.trainer.models.experts.balance import AUX_LOSS, Z_LOSS, Samples, aux_loss, describe_balance, z_loss
from hpcrl.types import ROUTED_EXPERTS, MicroBatch

_OWN = -1  # in place of an expert: the router chooses


@dataclass
class _Pass:
    """One micro-batch on its way through the model, and back: a layer that is computed again does the same once more.

    Attributes:
        given: [N, L, k] int64, the experts that each token goes to in each layer; _OWN: those that the router chooses. None: nowhere given.
        samples: None where nothing is to be told: in passes without gradient, and of micro-batches without samples.
        losses: of the layers.
        forward: it has not come to its loss yet.
    """

    given: torch.Tensor | None
    samples: Samples | None
    losses: list[torch.Tensor] = field(default_factory=list)
    forward: bool = True


class Routing:
    """The routers of a model.

    Args:
        model: on the meta device; where it is no mixture of experts, nothing is done here.
        config: None: routers do as they are, and tell nothing.
        packing: samples lie end to end; otherwise each is a padded row.

    Raises:
        DataError: its routers cannot do what the configuration asks for.
    """

    def __init__(self, model: PreTrainedModel, config: ExpertsConfig | None, *, packing: bool) -> None:
        self._config, self._packing = config or ExpertsConfig(), packing
        found = [] if config is None else routers(model)
        _require(model, found, self._config)
        self._shape = (len(found), len(_weight(found[0]))) if found else (0, 0)
        self._pass: _Pass | None = None
        self._told: torch.Tensor | None = None
        self._tokens = 0
        for layer, router in enumerate(found):
            # not a hook: the experts of a token must be known while the router computes
            router.forward = partial(self._routed, layer, router.forward)

    @property
    def layers(self) -> int:
        """How many layers have routers."""
        return self._shape[0]

    @contextmanager
    def during(self, batch: MicroBatch, sequences: Packed, *, trained: bool) -> Iterator[None]:
        """Let routers know which micro-batch they see, forward and backward.

        Args:
            batch: on the model's device.
            trained: its losses count, and it is told of.
        """
        told = trained and batch.share > 0 and self._shape[0] > 0
        self._pass = _Pass(self._given(batch, sequences), self._samples(batch, sequences) if told else None)
        try:
            yield
        finally:
            self._pass = None

    def loss(self) -> torch.Tensor | float:
        """Return what the losses of the pass that has come so far add to its loss."""
        assert self._pass is not None
        self._pass.forward = False
        return sum(self._pass.losses, start=0.0)

    def told(self) -> list[float]:
        """Return numbers that are to be added over ranks for `describe`, and forget them; as many on all ranks."""
        told, tokens = self._told, self._tokens
        self._told, self._tokens = None, 0
        layers, experts = self._shape
        return [float(tokens), *([0.0] * (layers * (experts + 3)) if told is None else told.flatten().tolist())]

    def describe(self, told: list[float]) -> dict[str, float]:
        """Return metrics of a mini-batch, of the sums over all ranks; empty: nothing was told."""
        if not told[0]:
            return {}
        layers, experts = self._shape
        sums = torch.tensor(told[1:], dtype=torch.float64).view(layers, experts + 3)
        found = describe_balance(sums[:, :experts], sums[:, experts], told[0])
        found |= {AUX_LOSS: sums[:, experts + 1].mean().item()} if self._config.aux_loss_coef else {}
        return found | ({Z_LOSS: sums[:, experts + 2].mean().item()} if self._config.z_loss_coef else {})

    def _given(self, batch: MicroBatch, sequences: Packed) -> torch.Tensor | None:
        """Return the experts that the engine chose, in the order in which routers see the tokens; see _Pass."""
        known = [sample[ROUTED_EXPERTS] for sample in batch.tensors if ROUTED_EXPERTS in sample]
        if self._config.router_replay == "none" or not known or not self._shape[0]:
            return None
        layers, chosen = known[0].shape[1:]
        if layers != self._shape[0]:
            raise DataError(
                f"samples tell of the experts in {layers} layers, and the model has them in {self._shape[0]}"
            )
        given_P = torch.cat(
            [
                sample[ROUTED_EXPERTS].long()
                if ROUTED_EXPERTS in sample
                else known[0].new_full((length, layers, chosen), _OWN).long()
                for sample, length in zip(batch.tensors, batch.lengths, strict=True)
            ]
        )
        if self._packing:
            return sequences.computed(given_P)
        assert isinstance(sequences, PackedSequences)
        return sequences.rows(given_P).flatten(0, 1)

    def _samples(self, batch: MicroBatch, sequences: Packed) -> Samples:
        lengths_B = batch.cu_seqlens.diff()
        count, total = len(batch.lengths), sum(batch.lengths)
        owners_P = torch.arange(count, device=lengths_B.device).repeat_interleave(lengths_B, output_size=total)

        def flat(values_N: torch.Tensor) -> torch.Tensor:
            assert isinstance(sequences, PackedSequences)
            return sequences.flat(values_N.unflatten(0, (count, sequences.max_seqlen)))

        return Samples(owners_P, lengths_B.float(), sequences.spread if self._packing else flat, batch.share)

    @torch.compiler.disable
    def _routed(
        self, layer: int, forward: Callable[..., tuple[torch.Tensor, ...]], *inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        current = self._pass
        if current is None:
            return forward(*inputs)
        with nullcontext() if current.given is None else Chosen(current.given[:, layer]):
            logits_NE, *others = outputs = forward(*inputs)
        if current.samples is not None:
            self._note(layer, logits_NE.float(), others[1], current, current.samples)
        return outputs

    def _note(
        self, layer: int, logits_NE: torch.Tensor, experts_Nk: torch.Tensor, current: _Pass, samples: Samples
    ) -> None:
        """Add the losses of a layer to those of the pass, and what is told of it to what is told of others."""
        config, experts = self._config, self._shape[1]
        probabilities_NE = logits_NE.softmax(-1)
        chosen_BE, costs = samples.chosen(experts_Nk, experts), logits_NE.new_zeros(2)
        if config.aux_loss_coef:
            cost = samples.share * aux_loss(probabilities_NE, chosen_BE, samples).sum()
            costs[0] = cost.detach()
            current.losses.append(config.aux_loss_coef * cost)
        if config.z_loss_coef:
            cost = samples.share * z_loss(logits_NE, samples).sum()
            costs[1] = cost.detach()
            current.losses.append(config.z_loss_coef * cost)
        if not current.forward:  # in backward the layer is computed again
            return
        entropy = samples.spread(torch.special.entr(probabilities_NE.detach()).sum(-1)).sum()
        if self._told is None:  # nowhere but on the device, so that the host need not wait
            self._told = torch.zeros(self._shape[0], experts + 3, dtype=torch.float64, device=logits_NE.device)
        self._told[layer] += torch.cat([chosen_BE.sum(0), entropy[None], costs])
        self._tokens += len(samples.owners) if layer == 0 else 0


class Chosen(TorchFunctionMode):
    """Lets a router's `torch.topk` give experts that were chosen before, with the scores that they have now: its own code does the rest.

    Args:
        given: [N, k] int64; _OWN where it chooses.

    Attributes:
        calls: of topk so far.
    """

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self._given, self.calls = given, 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        self.calls += 1
        experts = torch.where(self._given < 0, found.indices, self._given)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))


def _weight(router: nn.Module) -> torch.Tensor:
    """Return a router's matrix, [E, D]."""
    weight = router.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _require(model: PreTrainedModel, found: list[nn.Module], config: ExpertsConfig) -> None:
    wanted = [name for name, value in vars(config).items() if value not in (0, "none")]
    if not wanted:
        return
    section, kind = "trainer.policy.experts", type(model).__name__
    if not found:
        raise DataError(
            f"{section}.{wanted[0]}: {kind} has no routers that transformers gives the logits of; leave it out"
        )
    if config.aux_loss_coef and any("correction_bias" in name for name in model.state_dict()):
        raise DataError(f"{section}.aux_loss_coef: {kind} balances its experts by a bias, not by a loss; use 0")
    if config.router_replay != "none" and not all(
        _repeats(router, model.config.get_text_config().num_experts_per_tok) for router in found
    ):
        raise DataError(
            f'{section}.router_replay: routers of {kind} choose by something else than one topk, so that choices cannot be repeated; use "none"'
        )


def _repeats(router: nn.Module, count: int) -> bool:
    """Return whether a router, on the meta device, chooses its experts by one topk, whose result is what it returns."""
    weight = _weight(router)
    given = torch.zeros(2, count, dtype=torch.int64, device=weight.device)
    with torch.no_grad(), Chosen(given) as chosen:
        *_, experts = router(torch.zeros(2, weight.shape[1], dtype=weight.dtype, device=weight.device))
    return chosen.calls == 1 and experts.shape == given.shape
