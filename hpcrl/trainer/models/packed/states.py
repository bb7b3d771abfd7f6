"""Layers that carry a state from token to token, as Mamba's, gated delta nets and short convolutions do, over packed samples: each sample begins
with an empty state.

transformers' own layers use the bounds of samples only with certain GPU kernels; its code in torch ignores them silently. So each layer is
called with a row per sample, padded on the right: no token's output depends on what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from hpcrl.config.rules.model_fit import STATE_LAYERS, other_layers
from hpcrl.errors import DataError
from hpcrl.trainer.models.packed.attention import Packed

_FULL = 0.75  # share of the longest sample of a call that its shortest one has at least


class SampleBounds:
    """Sample bounds of the current micro-batch, for layers of a model.

    Attributes:
        now: None: each sample is a row anyway.
    """

    def __init__(self) -> None:
        self.now: Packed | None = None

    def keep(self, layer: nn.Module) -> None:
        """Reset a layer's state at each sample, for hidden states [1, D, ...]."""
        plain = layer.forward

        # the bounds are not among the arguments: several models give their layers none but those they name
        @torch.compiler.disable
        def forward(hidden_states: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
            bounds = self.now
            if bounds is None:
                return plain(hidden_states, *args, **options)
            options.pop("packed", None)  # of attention
            whole_P = bounds.spread(hidden_states[0])
            output_P = by_samples(whole_P, bounds.lengths, lambda rows: plain(rows, *args, **options))
            return bounds.computed(output_P)[None]

        layer.forward = forward


def by_samples(
    values_P: torch.Tensor, lengths: Sequence[int], run: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return what `run` makes of packed samples, [P, ...], when it is given [B, T, ...], samples of similar lengths with zeros on their right."""
    samples, outputs = values_P.split(list(lengths)), dict[int, torch.Tensor]()
    for together in similar(lengths):
        rows = nn.utils.rnn.pad_sequence([samples[at] for at in together], batch_first=True)
        for at, row in zip(together, run(rows), strict=True):
            outputs[at] = row[: lengths[at]]
    return torch.cat([outputs[at] for at in range(len(lengths))])


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Return the places of `lengths`, in groups within which no length is much smaller than the largest."""
    found: list[list[int]] = []
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if not found or lengths[at] < _FULL * lengths[found[-1][0]]:
            found.append([])
        found[-1].append(at)
    return found


def keep_samples_apart(model: PreTrainedModel) -> SampleBounds:
    """Keep tokens of a packed sample independent of other samples: in attention, which has to be PACKED or PADDED, and in states.

    Raises:
        DataError: the model has layers for which that is not known.
    """
    bounds, known, others = SampleBounds(), set(STATE_LAYERS.values()), other_layers(model.config.to_dict())
    inside = set[nn.Module]()
    for module in model.modules():
        if type(module).__name__ in known:
            bounds.keep(module)
            inside |= set(module.modules())
        elif isinstance(module, nn.Conv1d) and module not in inside:
            others.append(type(module).__name__)
    if not (inside or type(model)._supports_attention_backend):
        raise DataError(
            f"{type(model).__name__} has attention for which transformers takes no kernel from outside, as hpcrl needs it; use another model"
        )
    if others:
        raise DataError(
            f"{type(model).__name__} has layers in which tokens of one packed sample may depend on those of another ({', '.join(sorted(set(others)))}); "
            "set trainer.use_sample_packing to false"
        )
    return bounds
