"""Adapters of experts: one per expert in Megatron-core, one per layer in PEFT."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from hpcrl.trainer.backends.megatron.names import Slot, name_in_memory, table_name
from hpcrl.trainer.models.adapter import Adapted, together

_PARAMETERS = (
    "gate_up_proj",
    "down_proj",
)  # in the order in which transformers has them; PEFT's adapter of the last is around the others
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class _Place:
    """An expert's rows in the tensor of all experts of transformers."""

    expert: int
    tensor: str
    rows: slice


class ExpertPlaces:
    """Offsets of the tensors of files in transformers' parameters of experts.

    Args:
        table: of Megatron-core's linear layers.
    """

    def __init__(self, table: Mapping[str, Slot]) -> None:
        self._places: dict[str, list[_Place]] = {}
        for slot in table.values():
            if slot.expert is not None:
                begin = 0
                for name, (rows, *_) in slot.tensors.items():
                    place = _Place(slot.expert, name, slice(begin, begin + rows))
                    self._places.setdefault(name_in_memory(name), []).append(place)
                    begin += rows

    def of_each(self, layer: Adapted) -> Iterator[tuple[str, Adapted]]:
        """Yield the adapter of each expert's tensor, by the tensor's name without "weight"."""
        if not layer.experts:
            yield table_name(layer.name), layer
            return
        A, B = layer.of_each()
        for place in self._places[table_name(layer.weight)]:
            name, expert = place.tensor.removesuffix(".weight"), place.expert
            yield name, Adapted(layer.name, A[expert], B[expert, place.rows], layer.scaling, place.tensor)


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return transformers' parameters from the tensors of files, with the experts of a layer in one tensor."""
    found, of_experts = dict[str, torch.Tensor](), dict[str, dict[int, list[torch.Tensor]]]()
    for name, tensor in tensors.items():
        number = _EXPERT.search(name)
        if number is None:
            found[name_in_memory(name)] = tensor
        else:
            of_experts.setdefault(name_in_memory(name), {}).setdefault(int(number[1]), []).append(tensor)
    for name, experts in of_experts.items():
        found[name] = torch.stack([torch.cat(experts[number]) for number in range(len(experts))])
    return found


def of_all(layers: Iterable[Adapted]) -> list[Adapted]:
    """Return PEFT's adapters from those of each tensor of a file."""
    found, of_experts = list[Adapted](), dict[str, dict[int, list[Adapted]]]()
    for layer in layers:
        number = _EXPERT.search(layer.weight)
        if number is None:
            found.append(layer)
        else:
            of_experts.setdefault(name_in_memory(layer.weight), {}).setdefault(int(number[1]), []).append(layer)
    for weight, experts in of_experts.items():
        prefix, _, leaf = weight.rpartition(".")
        around = [other for other in _PARAMETERS[_PARAMETERS.index(leaf) + 1 :] if f"{prefix}.{other}" in of_experts]
        parts = [experts[number] for number in range(len(experts))]
        A = torch.stack([first.A for first, *_ in parts])
        B = torch.stack([torch.cat([part.B for part in expert]) for expert in parts])
        A, B = together(A, B)
        name = prefix + ".base_layer" * len(around)
        found.append(replace(parts[0][0], name=name, A=A, B=B, weight=weight, experts=len(parts)))
    return found
