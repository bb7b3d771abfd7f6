"""Files of one group, and their rows as torch has them, for what is computed beside the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrl.data.group_file import group_bytes, read_group
from hpcrl.rundir.commit import write_bytes
from hpcrl.types import GroupMeta, Hint, Row, SamplingMask


def group_meta(**columns: Any) -> GroupMeta:
    """Return a group by its JSON."""
    known = {"group_id": "g", "kind": "train", "replica": 0, "path": "p", "data_source": "x", "seconds": 1.0}
    return GroupMeta.from_json({**known, "oldest_version": 0, "newest_version": 0, **columns})


def with_columns(meta: GroupMeta, **columns: Any) -> GroupMeta:
    """Return a group with other fields of its JSON."""
    return GroupMeta.from_json({**meta.to_json(), **columns})


def write_group(path: Path, samples: Sequence[Row], meta: GroupMeta, ground_truth: str = "") -> GroupMeta:
    """Write a file of one group; args and result as of `group_bytes`."""
    content, meta = group_bytes(samples, meta, ground_truth=ground_truth)
    write_bytes(path, content)
    return meta


def read_tensors(
    path: Path, indices: Sequence[int] | None = None, expected: GroupMeta | None = None
) -> list[Row[torch.Tensor]]:
    """Return what `read_group` does, as tensors."""
    return [as_tensors(row) for row in read_group(path, indices, expected)]


def as_tensors(row: Row[np.ndarray]) -> Row[torch.Tensor]:
    def tensors(arrays: Row[np.ndarray] | SamplingMask[np.ndarray]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(value) for name, value in vars(arrays).items() if isinstance(value, np.ndarray)}

    mask, hint = row.sampling_mask, row.hint
    return Row(
        **tensors(row),
        stop_reason=row.stop_reason,
        env_metrics=row.env_metrics,
        sampling_mask=None if mask is None else SamplingMask(**tensors(mask)),
        hint=None
        if hint is None
        else Hint(torch.from_numpy(hint.token_ids), hint.replaces, tuple(map(torch.from_numpy, hint.wrong))),
        tensors={name: torch.from_numpy(array) for name, array in row.tensors.items()},
    )
