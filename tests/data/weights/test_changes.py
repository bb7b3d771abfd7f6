"""Changes between two versions give back the second one, bit by bit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.data.weight_files import WeightFile, bytes_of, digest_of
from hpcrl.data.weights.changes import GAPS, VALUES, Changes, changed
from hpcrl.errors import CommitError

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(BITS[tensor.element_size()]).numpy()


def applied(directory: Path, before: torch.Tensor, after: torch.Tensor) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return `before` after the changes to `after` were written and read, and what was written."""
    found = changed(bits(before), bits(after))
    entries = {"w": after} if found is None else {f"w{part}": torch.from_numpy(array) for part, array in found.items()}
    file = WeightFile(directory / "changes.safetensors", entries)
    for name, entry in entries.items():
        file.write(name, entry)
    file.close()
    with closing(Changes(directory)) as changes:
        return bytes(changes.apply("w", bytearray(bytes_of(before)), before.element_size())), entries


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("places", [[0], [29_999], [0, 1, 2], list(range(0, 30_000, 100)), [5, 29_000]])
def test_what_changed_is_applied(tmp_path: Path, dtype: torch.dtype, places: list[int]) -> None:
    torch.manual_seed(1)
    before = (torch.randn(100, 300) * 20).to(dtype)
    after = before.clone()
    flat = after.view(-1).view(BITS[dtype.itemsize])
    flat[places] = (1 - flat[places]) if dtype == torch.bool else (flat[places] ^ 1)
    found, entries = applied(tmp_path, before, after)
    assert found == bytes(bytes_of(after))
    assert set(entries) == {f"w{GAPS}", f"w{VALUES}"}
    assert len(entries[f"w{VALUES}"]) == len(places)


def test_bits_count_and_not_values(tmp_path: Path) -> None:
    before = torch.zeros(1000, dtype=torch.bfloat16)
    before[7] = torch.nan
    after = before.clone()
    after[3], after[9] = -0.0, torch.inf
    found, entries = applied(tmp_path, before, after)
    assert found == bytes(bytes_of(after))
    assert entries[f"w{GAPS}"].tolist() == [3, 6], "zero became minus zero, and what is no number stayed what it was"


@pytest.mark.parametrize(
    ("last", "kind"), [(255, torch.uint8), (256, torch.int16), (32_767, torch.int16), (32_768, torch.int32)]
)
def test_gaps_have_the_smallest_type(tmp_path: Path, last: int, kind: torch.dtype) -> None:
    before = torch.zeros(40_000, dtype=torch.bfloat16)
    after = before.clone()
    after[last] = 1.0
    found, entries = applied(tmp_path, before, after)
    assert found == bytes(bytes_of(after))
    assert entries[f"w{GAPS}"].dtype == kind


def test_nothing_is_written_of_what_did_not_change_and_all_of_what_did(tmp_path: Path) -> None:
    before = torch.randn(64).to(torch.bfloat16)
    assert changed(bits(before), bits(before.clone())) == {}
    assert changed(bits(before), bits(before + 1)) is None
    found, _ = applied(tmp_path, before, before + 1)
    assert found == bytes(bytes_of(before + 1))
    scalar = torch.tensor(2.0)
    (tmp_path / "scalar").mkdir()
    assert applied(tmp_path / "scalar", scalar, scalar * 3)[0] == bytes(bytes_of(scalar * 3))
    empty = torch.empty(0, dtype=torch.bfloat16)
    assert changed(bits(empty), bits(empty)) == {}


def test_changes_of_a_larger_tensor_are_refused(tmp_path: Path) -> None:
    after = torch.zeros(100, dtype=torch.bfloat16)
    after[90] = 1.0
    applied(tmp_path, torch.zeros(100, dtype=torch.bfloat16), after)
    with closing(Changes(tmp_path)) as changes, pytest.raises(CommitError, match="changes of w that do not fit it"):
        changes.apply("w", bytearray(2 * 50), 2)


def test_random_changes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number, share in enumerate([0.0001, 0.01, 0.2, 0.4, 0.7, 1.0]):
        before = torch.from_numpy(generator.integers(-(2**15), 2**15, 5000, dtype=np.int16)).view(torch.bfloat16)
        mask = torch.from_numpy(generator.random(5000) < share)
        after = torch.where(mask, before.view(torch.int16) + 1, before.view(torch.int16)).view(torch.bfloat16)
        (folder := tmp_path / str(number)).mkdir()
        found, entries = applied(folder, before, after)
        assert digest_of(memoryview(found)) == digest_of(bytes_of(after))
        assert sum(entry.nbytes for entry in entries.values()) <= after.nbytes
