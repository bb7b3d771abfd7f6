"""Weights from Hugging Face files into Megatron-core's parameters, and back: each rank reads its share, and gets the pieces whole that it writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from torch import nn

from hpcrl.data.entries import read_entries
from hpcrl.data.models.files import model_folder
from hpcrl.errors import DataError
from hpcrl.trainer.backends.base import ExportPiece
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.names import (
    EMBEDDING,
    VALUE_HEAD,
    Block,
    LocalWeight,
    Slot,
    local_experts,
    local_weights,
    slots,
)
from hpcrl.trainer.backends.megatron.process_groups import expert_tensor_group, experts_group, tensor_group
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.hf import CriticSource, ModelSource

HEAD_NAME = "lm_head.weight"
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Files:
    """The safetensors files of a model, of which only what is asked for is read."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._open: dict[Path, Any] = {}
        try:
            directory = model_folder(source, ["model*.safetensors", _INDEX])
            self._places = self._find(directory)
        except (OSError, ValueError, SafetensorError) as error:
            raise source.not_a_model(error) from error

    def _find(self, directory: Path) -> dict[str, Path]:
        if (directory / _ONE_FILE).is_file():
            return dict.fromkeys(self._file(directory / _ONE_FILE).keys(), directory / _ONE_FILE)
        if (directory / _INDEX).is_file():
            places = read_entries(directory / _INDEX).get("weight_map")
            if not isinstance(places, dict) or any(Path(str(file)).name != file for file in places.values()):
                raise ValueError(f"{directory / _INDEX} has no weight_map of names of files beside it")
            return {name: directory / file for name, file in places.items()}
        raise DataError(
            f"model {self._source.path!r} has neither {_ONE_FILE} nor {_INDEX}, which trainer.strategy=megatron reads; if its "
            "weights are of another kind, such as pytorch_model.bin, convert them with "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…) of transformers, or use trainer.strategy=fsdp2"
        )

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _stored(self, name: str) -> str | None:
        # a model without its head is saved without this prefix
        near = name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"
        return next((stored for stored in (name, near) if stored in self._places), None)

    def __contains__(self, name: str) -> bool:
        return self._stored(name) is not None

    def read(self, block: Block, slot: Slot) -> torch.Tensor:
        """Return a block from its file."""
        stored = self._stored(block.name)
        assert stored is not None, block
        try:
            tensor = self._file(self._places[stored]).get_slice(stored)
            found, expected = tuple(tensor.get_shape()), slot.tensors[block.name]
            if found != expected:
                raise self._source.not_a_model(
                    f"{stored} has the shape {found}; by its configuration it has {expected}"
                )
            return tensor[(slice(None),) * slot.dim + (slice(block.start, block.stop),)]
        except (OSError, SafetensorError) as error:
            raise self._source.not_a_model(error) from error


def load(chunks: Sequence[GPTModel], architecture: Architecture, source: ModelSource, world: World) -> None:
    """Read the model into the parameters of `chunks`, in their types. All ranks call it; each reads its share.

    Args:
        chunks: this rank's pipeline stages, bare: without wrappers.

    Raises:
        DataError: on every rank: it cannot be loaded, weights are missing, or have other shapes than `architecture` says.
    """
    table, here = slots(architecture), list(local_weights(chunks, architecture))
    _require_whole(table, here, local_experts(architecture))

    def read() -> None:
        files = _Files(source)
        missing = {name for part in here for name in table[part.name].tensors if name not in files}
        drawn = f"{source.head}.weight" if isinstance(source, CriticSource) else None
        source.expect_all(sorted(missing - {drawn}))
        for part in here:
            if part.name == VALUE_HEAD and drawn in missing:
                assert isinstance(source, CriticSource)
                with torch.no_grad():
                    part.parameter.copy_(source.drawn_head(part.parameter.shape[1]))
            else:
                _fill(part, table[part.name], files)
            if part.name == EMBEDDING and architecture.tied and HEAD_NAME in files:
                _require_tied(table[EMBEDDING], files, source)

    def fetch() -> None:
        _Files(source)

    world.rank0_broadcast(fetch)  # a model of the hub is downloaded once where nodes share their cache
    world.all_gather(read)


def _require_whole(table: dict[str, Slot], here: list[LocalWeight], experts: range) -> None:
    """Check that each weight of the table has a parameter: otherwise it would be ignored silently."""
    found = {part.name for part in here if not part.copy}
    places = {_place(name) for name in found}
    expected = {
        name
        for name, slot in table.items()
        if _place(name) in places and (slot.expert is None or slot.expert in experts)
    }
    assert found == expected, sorted(found ^ expected)


@torch.no_grad()
def _fill(part: LocalWeight, slot: Slot, files: _Files) -> None:
    rank, ranks = share_of(slot)
    target, at = part.within(part.parameter.data), 0
    assert target.shape == slot.shape(ranks), (part.name, target.shape, slot.shape(ranks))
    for block in slot.share(rank, ranks):
        length = block.stop - block.start
        target.narrow(slot.dim, at, length).copy_(files.read(block, slot))
        at += length
    target.narrow(slot.dim, at, target.shape[slot.dim] - at).zero_()


def _require_tied(slot: Slot, files: _Files, source: ModelSource) -> None:
    (words,) = slot.tensors.values()
    ours = [
        [files.read(block, each) for block in each.share(*share_of(each))] for each in (slot, Slot({HEAD_NAME: words}))
    ]
    if not all(torch.equal(one, other) for one, other in zip(*ours, strict=True)):
        raise source.not_a_model(
            f"tie_word_embeddings is true, but {HEAD_NAME} is not the embedding; set {source.role}.model_config_kwargs."
            "tie_word_embeddings=false"
        )


def share_of(slot: Slot) -> tuple[int, int]:
    """Return this rank's share of a slot, and the number of shares."""
    if not slot.split:
        return 0, 1
    group = tensor_group() if slot.expert is None else expert_tensor_group()
    return group.rank(), group.size()


def export_pieces(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    dtype: torch.dtype,
    world: World,
    wanted: Collection[str] | None = None,
) -> list[ExportPiece]:
    """Return the pieces of `export`: one parameter each, or one expert of each expert-parallel rank.

    A piece can be had by the ranks of its pipeline stage.

    Args:
        wanted: Hugging Face names; pieces without any of them are left out. None: all pieces.
    """
    table, here = slots(architecture), [part.name for part in local_weights(chunks, architecture) if not part.copy]
    places = world.all_gather(lambda: sorted({_place(name) for name in here}))
    pieces = []
    for names in _pieces(table, architecture, wanted):
        shapes = {name: shape for slot in names for name, shape in table[slot].tensors.items()}
        ranks = [rank for rank, held_there in enumerate(places) if _place(names[0]) in held_there]
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        pieces.append(ExportPiece(tensors, ranks))
    return pieces


def export(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    value: Callable[[nn.Parameter], torch.Tensor],
    dtype: torch.dtype,
    owners: Sequence[int],
    wanted: Collection[str] | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the model piece by piece under Hugging Face names: whole CPU tensors on the owner, nothing on other ranks.

    All ranks exhaust the iterator.

    Args:
        chunks: this rank's pipeline stages, bare: without wrappers.
        value: what is exported of a parameter, of its shape: its data, or its gradient.
        dtype: to which it is cast before it is sent.
        owners: one of its ranks for each piece of `export_pieces`.
        wanted: as there.
    """
    table = slots(architecture)
    here = {part.name: part for part in local_weights(chunks, architecture) if not part.copy}
    for names, owner in zip(_pieces(table, architecture, wanted), owners, strict=True):
        parts, mine = [table[name] for name in names], next((here[name] for name in names if name in here), None)
        if mine is None:
            yield {}
        else:
            whole = _gather(parts, lambda mine=mine: mine.within(value(mine.parameter)).detach().to(dtype), owner)
            yield {name: tensor.cpu() for name, tensor in whole.items()}


def _place(name: str) -> str:
    """Return the pipeline stage of a slot: the embedding, a layer or the part after the layers."""
    found = re.match(r"embedding|decoder\.layers\.\d+", name)
    return found[0] if found else "end"


def _pieces(table: dict[str, Slot], architecture: Architecture, wanted: Collection[str] | None) -> Iterator[list[str]]:
    """Yield slots that are gathered in one collective: of experts, one from each expert-parallel rank."""
    each = len(local_experts(architecture))
    ranks = parallel_state.get_expert_model_parallel_world_size()
    for name, slot in table.items():
        if wanted is not None and slot.tensors.keys().isdisjoint(wanted):
            continue
        if slot.expert is None:
            yield [name]
        elif slot.expert < each:
            first = f".experts.{slot.expert}."
            yield [name.replace(first, f".experts.{slot.expert + rank * each}.") for rank in range(ranks)]


def _gather(parts: list[Slot], value: Callable[[], torch.Tensor], owner: int) -> dict[str, torch.Tensor]:
    """Return whole tensors on the owner, nothing on others.

    Args:
        parts: slots whose shares lie one after the other on the ranks of their group.
        value: gives this rank's share; only called where it is needed.
    """
    _, ranks = share_of(parts[0])
    group = tensor_group() if parts[0].expert is None else experts_group()
    count, owns = ranks * len(parts), dist.get_rank() == owner
    if count == 1:
        return _joined(parts, [value()]) if owns else {}
    if owner not in dist.get_process_group_ranks(group):  # it has a copy of these from ranks of its own
        return {}
    # gloo silently misreads what is not contiguous
    share = value().contiguous()
    shares = [torch.empty_like(share) for _ in range(count)] if owns else None
    dist.gather(share, shares, dst=owner, group=group)
    return _joined(parts, shares) if shares else {}


def _joined(parts: list[Slot], shares: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    whole, ranks = {}, len(shares) // len(parts)
    for number, share in enumerate(shares):
        slot, at = parts[number // ranks], 0
        for block in slot.share(number % ranks, ranks):
            if block.name not in whole:
                whole[block.name] = share.new_empty(slot.tensors[block.name])
            length = block.stop - block.start
            whole[block.name].narrow(slot.dim, block.start, length).copy_(share.narrow(slot.dim, at, length))
            at += length
    return whole
