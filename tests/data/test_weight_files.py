"""Weights are files of safetensors' format, whoever reads them, and have the digest with which they were written."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.data.weight_files import WeightFile, WeightReader, whole_digest

TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "half": torch.randn(4, 5).bfloat16(),
    "none": torch.zeros(0, 7),
    "one": torch.tensor(2.5),
    "wide": torch.randn(2, 3, 4),
    "seen from behind": torch.randn(6, 5).T,
    "count": torch.arange(9),
}


def written(path: Path) -> dict[str, str]:
    file = WeightFile(path, {name: tensor.to("meta") for name, tensor in TENSORS.items()})
    digests = {name: file.write(name, tensor) for name, tensor in reversed(TENSORS.items())}
    assert file.complete
    file.close()
    return digests


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_is_read_has_the_digests_of_what_was_written_in_the_wanted_order(tmp_path: Path) -> None:
    digests = written(tmp_path / "model-1.safetensors")
    save_file({"another's": torch.randn(3)}, tmp_path / "model-2.safetensors")
    order = sorted(TENSORS)
    with closing(WeightReader(tmp_path, order)) as reader:
        found = list(reader)
    assert [name for name, _, _ in found] == [*order, "another's"]
    for name, tensor, digest in found[:-1]:
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])
        assert digest == digests[name]
    assert whole_digest(digests) == whole_digest(dict(sorted(digests.items())))
    assert whole_digest(digests) != whole_digest({**digests, "one": digests["odd"]})


def test_digests_are_made_of_what_nobody_else_digests(tmp_path: Path) -> None:
    digests = written(tmp_path / "model.safetensors")
    others = list(digests)[::2]
    with closing(WeightReader(tmp_path, undigested=others)) as reader:
        found = {name: digest for name, _, digest in reader}
    assert found == {name: "" if name in others else digest for name, digest in digests.items()}


def test_a_version_that_is_retired_is_read_to_its_end(tmp_path: Path) -> None:
    digests = written(tmp_path / "model.safetensors")
    with closing(WeightReader(tmp_path)) as reader:
        (tmp_path / "model.safetensors").unlink()
        assert {name: digest for name, _, digest in reader} == digests


@pytest.mark.parametrize(("keep", "said"), [(5, "early"), (40, "is no safetensors file"), (-1, "1 bytes early")])
def test_what_is_cut_short_is_told(tmp_path: Path, keep: int, said: str) -> None:
    written(tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises((ValueError, OSError), match=said), closing(WeightReader(tmp_path)) as reader:
        list(reader)


def test_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no safetensors file"):
        WeightReader(tmp_path)
