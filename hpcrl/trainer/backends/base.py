"""Interface of a training backend. Packing, losses and jobs use nothing else of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import ProcessGroup

from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.adapter import Adapter
from hpcrl.types import MicroBatch

if TYPE_CHECKING:
    from hpcrl.trainer.models.hf import ModelSource

Objective = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Maps (micro-batch, model outputs) to the loss to differentiate and its metrics, both sums: over all micro-batches and ranks they are
those of the mini-batch. A policy's outputs are logprobs [P] and entropies [P], a critic's are values [P]."""


class MicroBatches(Protocol):
    """The micro-batches of this rank, as many on every rank; they are made as they are taken."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MicroBatch]: ...


Writer = Callable[[Path, ProcessGroup], None]
"""Writes a state into an existing directory, each rank its shards; ranks communicate over the given group of all trainer ranks."""


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    Attributes:
        grad_norm: norm of all gradients together, before clipping.
        lr: learning rate of this step.
        skipped: nothing was updated: the norm was not finite, or no token was trained.
        loss_scale: by which the loss was multiplied, so that no gradient became 0 in float16.
        experts: metrics of how the mini-batch used the experts of a mixture; empty: the model is none.
    """

    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float = 1.0
    experts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step: metric sums (or extremes, see `merge`) over all ranks, and the step itself."""

    sums: dict[str, float]
    report: StepReport

    @classmethod
    def of(cls, value: dict[str, Any]) -> UpdateResult:
        """Return the result of dataclasses.asdict as an UpdateResult."""
        return cls(value["sums"], StepReport(**value["report"]))


class ModelEngine(Protocol):
    """A model in training, spread over all ranks. Every verb is called by all ranks.

    Micro-batches are taken one at a time, each before it is computed; an engine that computes several at the same time takes all of them
    before the first. What is raised where one is taken leaves the verb, and leaves gradients to `skip`.

    Attributes:
        updates: optimizer steps done; part of the saved state.
        data: the ranks that train other samples than this one, and this one: samples are assigned to them, and metrics are summed over them.
    """

    updates: int
    data: World

    def schedule(self, total_updates: int) -> None:
        """Set how many optimizer steps the whole run has, for learning rates that decay towards its end."""
        ...

    def forward_backward(self, batches: MicroBatches, objective: Objective) -> dict[str, torch.Tensor]:
        """Add the gradient of the objective's loss over this rank's micro-batches; return their metrics, merged."""
        ...

    def step(self) -> StepReport:
        """Clip gradients, update and zero the gradients."""
        ...

    def skip(self) -> StepReport:
        """Zero the gradients without an update."""
        ...

    def save(self, directory: Path, group: ProcessGroup) -> None:
        """Write model, optimizer and `updates`, as a Writer does."""
        ...

    def snapshot(self) -> Writer:
        """Return a copy of the saved state in host memory; training may go on before it is written.

        The next one takes the place of the last one, which must be written by then.
        """
        ...

    def restore(self, directory: Path) -> None:
        """Load a saved state, on any number of ranks."""
        ...

    def restore_weights(self, directory: Path) -> None:
        """Load only the model of a saved state."""
        ...


@dataclass(frozen=True)
class ExportPiece:
    """Tensors of an exported policy that are gathered in one collective.

    Attributes:
        tensors: by Hugging Face's names, without values (on the meta device).
        ranks: those that can have them whole.
    """

    tensors: dict[str, torch.Tensor]
    ranks: Sequence[int]


class PolicyEngine(ModelEngine, Protocol):
    """A policy in training, with its frozen reference if it has one.

    Attributes:
        vocabulary: token ids that it knows.
        dtype: in which it computes.
        source: the model that training began with.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def source(self) -> ModelSource: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def logprobs(self, batches: MicroBatches, *, reference: bool = False) -> Iterator[torch.Tensor]:
        """Yield [P] log-probabilities of the labels, of the policy or of the reference, without gradient."""
        ...

    def entropies(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        """Yield [P] entropies of the policy at each token in nats, without gradient."""
        ...

    def logprobs_and_norms(self, batches: MicroBatches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield log-probabilities of the labels, and the squared norms of their gradients over the logits, [P] each, of the policy in one pass."""
        ...

    def top_logprobs(
        self, batches: MicroBatches, *, reference: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield log-probabilities of the labels [P], and ids and log-probabilities of other tokens, [P, K], without gradient.

        These are the `top_k` of each micro-batch that the model finds most probable, or its `teacher_ids`, if it has any.
        """
        ...

    def reset_reference(self, *, fresh_optimizer: bool, rate: float = 1.0) -> None:
        """Make the policy as it is now the reference, which becomes part of what `save` writes.

        Args:
            fresh_optimizer: the policy's optimizer forgets its moments.
            rate: share of the policy in the new reference; the rest is the old one.
        """
        ...

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probabilities at temperature 1 of each token but the first, given those before it."""
        ...

    def export_pieces(self, dtype: torch.dtype) -> list[ExportPiece]:
        """Return the pieces of an export in the order of its layers, the same on every rank."""
        ...

    def export_weights(self, dtype: torch.dtype, owners: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the pieces of `export_pieces`: whole CPU tensors on the rank that owns the piece, nothing on others.

        All ranks exhaust the iterator.

        Args:
            owners: one of its ranks for each piece.
        """
        ...

    def export_config(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the configuration of an exported model. Rank 0 writes."""
        ...

    def adapter(self) -> Adapter | None:
        """Return the adapters, on every rank; None: there are none. All ranks call it."""
        ...

    def sampling_adapter(self) -> Adapter | None:
        """Return the adapters for sampling, which may differ from the trained ones; as `adapter`."""
        ...

    def end_batch(self, step: int) -> None:
        """Update state that follows batches, after all optimizer steps of the batch of `step`."""
        ...

    def evaluated(self) -> AbstractContextManager[None]:
        """Compute with the weights that are evaluated and exported within the `with` statement, where they are not those in training.

        It is for whole statements, not for one inside another. What follows has the weights in training again, bit by bit.
        """
        ...


class CriticEngine(ModelEngine, Protocol):
    """A critic in training."""

    def values(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        """Yield [P] values, without gradient."""
        ...


def merge(totals: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
    """Add metrics to `totals`: sums, but for names that end in _max or _min, which are extremes."""
    for name, value in more.items():
        value = value.double()
        if name not in totals:
            totals[name] = value
        elif name.endswith("_max"):
            totals[name] = torch.maximum(totals[name], value)
        elif name.endswith("_min"):
            totals[name] = torch.minimum(totals[name], value)
        else:
            totals[name] = totals[name] + value
