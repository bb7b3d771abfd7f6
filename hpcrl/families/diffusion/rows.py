"""The denoising steps of a micro-batch as one batch of the transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hpcrl.families.diffusion.pipelines.kinds import Conditions
from hpcrl.families.diffusion.pipelines.samples import FREE, GIVEN, STEPS, conditions_in
from hpcrl.types import MicroBatch, to_device

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepRows:
    """N trained steps, those of a sample one after the other.

    Attributes:
        samples: tensors of each sample; empty: there are no samples, and one row that counts for nothing stands for them.
        counts: steps of each sample; they sum to N.
        entries: [N] int64, the micro-batch's entry of each step.
        given: conditions of the prompts, [N, ...].
        free: those of the empty prompt; None where guidance does not count.
    """

    samples: list[Tensors]
    counts: list[int]
    entries: torch.Tensor
    given: Conditions
    free: Conditions | None

    @classmethod
    def of(cls, batch: MicroBatch, samples: list[Tensors], idle: Conditions, *, guided: bool) -> StepRows:
        """Return the steps of a micro-batch, on its device.

        Args:
            samples: tensors of its samples; empty: it has none.
            idle: conditions of a row without a prompt.
            guided: whether the empty prompt's conditions are wanted.
        """
        device = batch.token_ids.device
        if not samples:
            none = {name: value.to(device) for name, value in idle.items()}
            return cls([], [1], torch.zeros(1, dtype=torch.int64, device=device), none, none if guided else None)
        counts = [len(tensors[STEPS]) for tensors in samples]
        ends = list(accumulate(batch.lengths))
        places = [place for end, count in zip(ends, counts, strict=True) for place in range(end - 1 - count, end - 1)]
        given = _repeated([conditions_in(tensors, GIVEN) for tensors in samples], counts)
        free = _repeated([conditions_in(tensors, FREE) for tensors in samples], counts) if guided else None
        return cls(samples, counts, to_device(torch.tensor(places), device), given, free)

    def flat(self, name: str) -> torch.Tensor:
        """Return a tensor [S, ...] of each sample, one after the other, [N, ...]."""
        return torch.cat([tensors[name] for tensors in self.samples])

    def repeated(self, name: str) -> torch.Tensor:
        """Return a tensor of each sample once for each of its steps, [N, ...]."""
        return _repeat(torch.stack([tensors[name] for tensors in self.samples]), self.counts)

    def scattered(self, values_N: torch.Tensor, length: int) -> torch.Tensor:
        """Return values of the steps in the places of the micro-batch's entries, [P] float32, 0 elsewhere."""
        return torch.zeros(length, device=values_N.device).index_put((self.entries,), values_N.float())


def _repeated(rows: Sequence[Conditions], counts: Sequence[int]) -> Conditions:
    return {name: _repeat(torch.stack([row[name] for row in rows]), counts) for name in rows[0]}


def _repeat(values_B: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    counts_B = to_device(torch.tensor(counts), values_B.device)
    return values_B.repeat_interleave(counts_B, 0, output_size=sum(counts))
