"""The file in which a rollout worker hands a finished group to the trainer.

One safetensors file per group: the tensors of all rows laid end to end, their lengths, and the GroupMeta as JSON in the header,
which says how many rows each sample has: one, or with generator.step_wise_trajectories one for each of its turns. The controller needs
only the header, people look at samples on login nodes: only `write_group` and `read_group` need torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import DataError
from hpcrl.run.commit import write_bytes
from hpcrl.types import GroupMeta, Sample

if TYPE_CHECKING:
    import numpy as np

_TENSORS = ("token_ids", "loss_mask", "rollout_logprobs", "versions", "rewards")
_META = "hpcrl_group"
_MAX_HEADER = 100 << 20  # the format's own limit; a damaged length must not make us read a whole file


def write_group(path: Path, samples: Sequence[Sample], meta: GroupMeta) -> None:
    """Write a group to `path`, complete or not at all; a reader never sees half a file.

    Args:
        samples: the rows; every tensor of a row is [T] with the same T, and `meta.lengths` are these T in the same order.
    """
    import torch
    from safetensors.torch import save

    lengths = [len(sample.token_ids) for sample in samples]
    assert lengths == meta.lengths, f"group {meta.group_id}: lengths {lengths} are not those of its meta {meta.lengths}"
    assert len(samples) == len(meta.owners), f"group {meta.group_id}: {len(samples)} rows, expected {len(meta.owners)}"
    tensors = {name: torch.cat([getattr(sample, name) for sample in samples]) for name in _TENSORS}
    assert all(len(tensor) == sum(lengths) for tensor in tensors.values()), f"group {meta.group_id}: ragged samples"
    tensors["lengths"] = torch.tensor(lengths)
    details = [{"stop_reason": sample.stop_reason, "env_metrics": sample.env_metrics} for sample in samples]
    write_bytes(path, save(tensors, {_META: json.dumps({"meta": meta.to_json(), "samples": details})}))


@dataclass(frozen=True)
class Arrays:
    """A row as it lies in its file.

    Attributes:
        columns: name of each tensor of `Sample` -> its values [T].
    """

    columns: dict[str, np.ndarray]
    stop_reason: Any
    env_metrics: dict[str, float]


def read_group(path: Path, indices: Sequence[int] | None = None, expected: Sequence[int] | None = None) -> list[Sample]:
    """Return the rows of the group at `path`, all of them or those at `indices`, in that order.

    Args:
        expected: tokens of each row of the group; None: whatever the file has.

    Raises:
        DataError: the file is missing or damaged, or its rows do not have the expected lengths.
    """
    import torch

    found = read_arrays(path, expected)
    chosen = found if indices is None else [found[index] for index in indices]
    # torch.tensor copies, so that a caller who keeps one sample does not keep the whole group
    return [
        Sample(
            **{name: torch.tensor(values) for name, values in sample.columns.items()},
            stop_reason=sample.stop_reason,
            env_metrics=sample.env_metrics,
        )
        for sample in chosen
    ]


def read_arrays(path: Path, expected: Sequence[int] | None = None) -> list[Arrays]:
    """Return the rows of the group at `path`, without torch; args and errors as in `read_group`."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load

    _, details = _header(path)
    try:
        tensors = load(path.read_bytes())
        lengths: list[int] = tensors["lengths"].tolist()
        whole = {name: tensors[name] for name in _TENSORS}
    except (SafetensorError, KeyError) as error:
        raise _damaged(path, str(error)) from error
    if len(lengths) != len(details):
        raise _damaged(path, f"{len(lengths)} lengths for {len(details)} samples")
    if any(values.shape != (sum(lengths),) for values in whole.values()):
        raise _damaged(path, f"its tensors do not have the {sum(lengths)} entries of its samples")
    if expected is not None and lengths != list(expected):
        raise _damaged(path, f"samples of {lengths} tokens where {list(expected)} are expected")
    ends = np.cumsum(lengths)[:-1]
    columns = {name: np.split(values, ends) for name, values in whole.items()}
    return [
        Arrays({name: parts[at] for name, parts in columns.items()}, detail["stop_reason"], detail["env_metrics"])
        for at, detail in enumerate(details)
    ]


def read_meta(path: Path) -> GroupMeta:
    """Return what the header of the group at `path` says, without reading its tensors and without torch.

    Raises:
        DataError: the file is missing or its header is damaged.
    """
    return _header(path)[0]


def _header(path: Path) -> tuple[GroupMeta, list[dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER:
                raise _damaged(path, f"a header of {size} bytes")
            header = json.loads(file.read(size))
        group = json.loads(header["__metadata__"][_META])
        return GroupMeta.from_json(group["meta"]), group["samples"]
    except FileNotFoundError as error:
        raise DataError(f"sample file {path} is missing: it was removed, or this node does not see the run") from error
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"sample file {path} is damaged ({why}); remove it and the group is generated again")
