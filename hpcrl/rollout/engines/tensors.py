"""Published weights in the worker's own process: read from files, and given to a model of transformers as an adapter."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.data.weight_files import ADAPTER_PREFIX, PublishedWeights, WeightReader
from hpcrl.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_NAMED = 8


def read_tensors(weights: PublishedWeights) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a published version by name, and their digests for `check_ranks`.

    Raises:
        EngineError: its files cannot be read.
    """
    given, tensors = dict[str, str](), dict[str, torch.Tensor]()
    try:
        with closing(WeightReader(weights.path)) as reader:
            for name, tensor, digest in reader:
                given[name], tensors[name] = digest, tensor
    except (OSError, ValueError) as error:
        raise EngineError(f"weights of version {weights.version}: {error}") from error
    return tensors, {"rank": 0, "of": 1, **weights.held(given)}


@torch.no_grad()  # parameters made in inference mode could not be moved from a GPU and back
def replace_adapter(model: PreTrainedModel, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Replace the adapter of a model, or add one.

    Args:
        tensors: by their names in PEFT's files.
        source: directory with PEFT's configuration beside them.

    Raises:
        EngineError: they are not for this model.
    """
    if not (own := _adapter_of(model)):
        import peft  # takes half a second, and most runs have no adapters

        # within a module, since of a model PEFT would take dense and shared layers beside experts for experts of older files
        peft.inject_adapter_in_model(
            peft.LoraConfig.from_pretrained(str(source)), torch.nn.ModuleDict({"model": model})
        )
        own = _adapter_of(model)
    named = {
        name.removeprefix(ADAPTER_PREFIX).replace(".weight", ".default.weight"): tensor
        for name, tensor in tensors.items()
    }
    if wrong := sorted(own.keys() ^ named.keys()):
        raise EngineError(f"{source} is no adapter of this model, by {', '.join(wrong[:_MOST_NAMED])}")
    for name, tensor in named.items():
        own[name].copy_(tensor)


def _adapter_of(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
