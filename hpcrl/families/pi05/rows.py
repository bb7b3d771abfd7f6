"""The turns of a micro-batch as one batch of the network that moves actions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from hpcrl.families.pi05.architecture import Pi05Architecture
from hpcrl.families.pi05.samples import ACTIONS, IMAGES, PATH, read_inputs
from hpcrl.types import MicroBatch, to_device


@dataclass(frozen=True)
class TurnRows:
    """B turns, with N actions that were done.

    Attributes:
        inputs: what the network reads, as of `read_inputs`.
        path: [B, S + 1, H, D].
        sizes: [B] int, how many of the D numbers the robot has.
        turns, places: [N] int64, of each action its turn and its place in the chunk.
        entries: [N] int64, the micro-batch's entry of each action.
    """

    inputs: tuple[torch.Tensor, ...]
    path: torch.Tensor
    sizes: torch.Tensor
    turns: torch.Tensor
    places: torch.Tensor
    entries: torch.Tensor

    @classmethod
    def of(cls, batch: MicroBatch, sizes: Pi05Architecture) -> TurnRows:
        """Return the turns of a micro-batch, on its device; without any, one action that counts for nothing stands for them."""
        device = batch.token_ids.device
        texts, rows, turns, places, entries = [], [], [], [], []
        for end, length, tensors in zip(accumulate(batch.lengths), batch.lengths, batch.tensors, strict=True):
            if tensors:
                done = int(tensors[ACTIONS][0])
                texts.append(batch.token_ids[end - length : end - done])
                turns += [len(rows)] * done
                places += range(done)
                entries += range(end - 1 - done, end - 1)
                rows.append(tensors)
        if not rows:
            idle = torch.zeros(2, sizes.chunk_size, sizes.action_dim, device=device)
            texts, turns, places, entries = [batch.token_ids[:1]], [0], [0], [0]
            rows = [{PATH: idle, ACTIONS: torch.ones(2, dtype=torch.int32, device=device)}]
        return cls(
            read_inputs(texts, [row.get(IMAGES) for row in rows], sizes.image_size),
            torch.stack([row[PATH] for row in rows]),
            torch.stack([row[ACTIONS][1] for row in rows]),
            *(to_device(torch.tensor(values), device) for values in (turns, places, entries)),
        )

    def scattered(self, values_BH: torch.Tensor, length: int) -> torch.Tensor:
        """Return values of the actions that were done in the places of the micro-batch's entries, [P] float32, 0 elsewhere."""
        values_N = values_BH[self.turns, self.places].float()
        return torch.zeros(length, device=values_N.device).index_put((self.entries,), values_N)
