"""Notes where a converted run computes other numbers than SkyRL of March 2026, for report and header."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.skyrl.source import SkyrlSource

_ALGORITHM = "trainer.algorithm."
_SUMS = ("cross_entropy", "importance_sampling")


def note_numbers(source: SkyrlSource, conversion: Conversion) -> None:
    """Note each number that comes out otherwise, with the reason."""
    for path, message in _different(source):
        conversion.note("differs", source.names.get(path, path), "", message)


def _different(source: SkyrlSource) -> Iterator[tuple[str, str]]:
    reduction, loss = source[_ALGORITHM + "loss_reduction"], source[_ALGORITHM + "policy_loss_type"]
    if source[_ALGORITHM + "use_kl_loss"] and loss != "cross_entropy":
        how = (
            ""
            if reduction == "sequence_mean"
            else f", here reduced as the loss is ({reduction}), there always as the mean over samples of their means"
        )
        yield (
            _ALGORITHM + "use_kl_loss",
            f"the KL term has a gradient, which it had not in SkyRL before 20 March 2026, a fault{how}",
        )
    if source[_ALGORITHM + "use_entropy_loss"] and loss != "cross_entropy":
        yield (
            _ALGORITHM + "use_entropy_loss",
            f"the entropy is reduced as the loss is ({reduction}); in SkyRL it is the mean over the tokens of a micro-batch",
        )
    if loss in _SUMS:
        message = f"{loss} is reduced by loss_reduction ({reduction}); in SkyRL it is the plain sum over a micro-batch, so that its gradients are larger"
        yield (
            _ALGORITHM + "policy_loss_type",
            message + (", and has neither a KL nor an entropy term" if loss == "cross_entropy" else ""),
        )
    elif reduction == "token_mean":
        message = 'the mean over the tokens of a mini-batch, as in SkyRL since 31 March 2026; before, of a micro-batch: loss_reduction = "token_mean_legacy"'
        yield _ALGORITHM + "loss_reduction", message
    if source["environment.env_class"] == "geometry3k":
        message = "answers and calls are read behind </think>, and compared by math-verify; SkyRL compares texts and sympy's formulas"
        yield "environment.env_class", message
