"""PI0.5's network with the weights of a directory, for trainer and engine."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.initialization import no_init_weights

from hpcrl.config.sections.model import Pretrained
from hpcrl.families.pi05.architecture import Pi05Architecture, architecture_of, folder_of, not_pi05, own_name
from hpcrl.families.pi05.network import Pi05

_MOST_NAMED = 5


def empty(model: Pretrained, dtype: torch.dtype) -> Pi05:
    """Return the network without weights, on the meta device."""
    with torch.device("meta"):
        return _made(model, architecture_of(model)).to(dtype)


def loaded(model: Pretrained, dtype: torch.dtype) -> Pi05:
    """Return the network with its weights, on the CPU. Raises DataError where the model is no PI0.5 or weights are missing."""
    with no_init_weights():
        network = _made(model, architecture_of(model)).to(dtype)
    own = dict(network.named_parameters())
    missing = set(own)
    try:
        for file in _weight_files(model):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if (known := own_name(name)) is None:
                        continue
                    with torch.no_grad():
                        own[known].copy_(opened.get_tensor(name))
                    missing.discard(known)
    except KeyError as error:
        raise not_pi05(model, f"the network has no {error}") from error
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: of another shape
        raise not_pi05(model, error) from error
    if missing:
        raise not_pi05(model, f"no weights for {', '.join(sorted(missing)[:_MOST_NAMED])}")
    return network


def stored_dtype(model: Pretrained) -> torch.dtype | None:
    """Return a number type that holds all weights without loss; None: there are none."""
    found: list[torch.dtype] = []
    for file in _weight_files(model):
        with safe_open(file, framework="pt") as opened:
            found += [opened.get_slice(name)[:0].dtype for name in opened.keys()]  # noqa: SIM118
    return reduce(torch.promote_types, found) if found else None


def _weight_files(model: Pretrained) -> list[Path]:
    return sorted(folder_of(model).glob("model*.safetensors"))


def _made(model: Pretrained, architecture: Pi05Architecture) -> Pi05:
    try:
        return Pi05(architecture)
    except (ValueError, TypeError, RuntimeError) as error:
        raise not_pi05(model, error) from error
