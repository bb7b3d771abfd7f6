"""A group file gives back what was written, in whole or in part, and damage never goes unnoticed."""

import json
import struct
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from hpcrl.data.group_file import check_group, group_bytes, groups_of, read_truth
from hpcrl.errors import DamagedError, DataError
from hpcrl.types import GroupMeta, Hint, Row, SamplingMask
from tests.rows import group_meta, read_tensors, write_group


def sample(length: int, seed: int) -> Row:
    draw = torch.Generator().manual_seed(seed)
    return Row(
        token_ids=torch.randint(0, 1 << 20, (length,), generator=draw),
        loss_mask=torch.randint(0, 2, (length,), generator=draw).float(),
        rollout_logprobs=-torch.rand(length, generator=draw),
        versions=torch.randint(-1, 9, (length,), generator=draw, dtype=torch.int32),
        rewards=torch.rand(length, generator=draw),
        stop_reason="stop" if seed % 2 else "length",
        env_metrics={"in_place": seed / 7},
    )


def meta(samples: list[Row]) -> GroupMeta:
    return group_meta(
        group_id="g000007",
        kind="train",
        replica=1,
        path="samples/1/g000007.safetensors",
        rewards=[float(s.rewards.sum()) for s in samples],
        lengths=[len(s.token_ids) for s in samples],
        response_lengths=[int(s.loss_mask.sum()) for s in samples],
        stop_reasons=[s.stop_reason for s in samples],
        oldest_version=0,
        newest_version=8,
        data_source="sort_letters",
        seconds=0.25,
        env_metrics=[s.env_metrics for s in samples],
    )


def masked(plain: Row) -> Row:
    """Return it with sampling masks at every third token."""
    counts = torch.arange(len(plain.token_ids), dtype=torch.int32) % 3
    return replace(plain, sampling_mask=SamplingMask(torch.arange(int(counts.sum()), dtype=torch.int32), counts))


def same(a: Row, b: Row) -> bool:
    names = [field.name for field in fields(Row) if field.name not in ("sampling_mask", "hint", "tensors")]
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    if a.tensors.keys() != b.tensors.keys():
        return False
    pairs += [(a.tensors[name], b.tensors[name]) for name in a.tensors]
    if (a.hint is None) != (b.hint is None):
        return False
    if a.hint is not None:
        pairs += zip(*((one.hint.token_ids, one.hint.replaces, *one.hint.wrong) for one in (a, b)), strict=True)
    if (a.sampling_mask is None) != (b.sampling_mask is None):
        return False
    if a.sampling_mask is not None:
        pairs += zip(vars(a.sampling_mask).values(), vars(b.sampling_mask).values(), strict=True)
    return all(torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.fixture
def group(tmp_path):
    samples = [sample(length, seed) for seed, length in enumerate([5, 1, 17, 8])]
    path = tmp_path / "samples" / "1" / "g000007.safetensors"
    write_group(path, samples, meta(samples))
    return path, samples


def test_the_ground_truth_is_there_for_people(tmp_path):
    samples = [sample(5, 0)]
    known = write_group(tmp_path / "with", samples, meta(samples), "42 </script>")
    assert read_truth(tmp_path / "with", known) == "42 </script>"
    assert read_truth(tmp_path / "without", write_group(tmp_path / "without", samples, meta(samples))) == ""
    content = (tmp_path / "with").read_bytes()
    (tmp_path / "with").write_bytes(content.replace(b"42 <", b"43 <"))
    with pytest.raises(DamagedError, match="its header is not what was written"):
        read_truth(tmp_path / "with", known)


def test_round_trip(group):
    path, samples = group
    read = read_tensors(path)
    assert len(read) == 4
    assert all(same(a, b) for a, b in zip(read, samples, strict=True))
    assert replace(check_group(path), digest="") == meta(samples)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing is left beside it


@pytest.fixture
def three(tmp_path):
    """Three groups in one file, and what was written."""
    path, content, metas, rows = tmp_path / "g000007.safetensors", b"", [], []
    for name in ("g000007", "g000003", "g000012"):
        rows.append([masked(sample(length, len(content) + length)) for length in (5, 9, 2)])
        own = replace(meta(rows[-1]), group_id=name, path=f"samples/1/{path.name}", offset=len(content))
        one, own = group_bytes(rows[-1], own)
        content += one
        metas.append(own)
    path.write_bytes(content)
    return path, metas, rows


def test_several_groups_of_one_file(three):
    path, metas, rows = three
    assert list(groups_of(path)) == metas
    for one, samples in zip(metas, rows, strict=True):
        assert check_group(path, one) == one
        assert all(same(a, b) for a, b in zip(read_tensors(path, None, one), samples, strict=True))
        assert same(read_tensors(path, [2], one)[0], samples[2])


def test_what_is_damaged_in_a_file_of_several_groups(three):
    path, metas, _ = three
    whole = path.read_bytes()
    bit = lambda at: whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]  # noqa: E731

    path.write_bytes(bit(metas[2].offset - 1))
    for read in (check_group, lambda path, one: read_tensors(path, None, one)):
        with pytest.raises(DamagedError, match=r"^group g000003: .*g000007\.safetensors is damaged \(row 2"):
            read(path, metas[1])
        for one in (metas[0], metas[2]):
            read(path, one)
    assert len(list(groups_of(path))) == 3

    path.write_bytes(bit(metas[1].offset + 60))
    found = groups_of(path)
    assert next(found).group_id == "g000007"
    with pytest.raises(DamagedError, match="is damaged"):
        next(found)
    check_group(path, metas[2])

    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match="ends after"):
        check_group(path, metas[2])
    with pytest.raises(DamagedError, match="not the one that the batch was composed of"):
        check_group(path, replace(metas[0], offset=metas[1].offset))
    path.write_bytes(whole)
    path.rename(path.with_name("g000008.safetensors"))
    with pytest.raises(DamagedError, match=r"it was written as samples/1/g000007\.safetensors"):
        list(groups_of(path.with_name("g000008.safetensors")))


def test_part_of_a_group_in_the_order_asked_for(group):
    path, samples = group
    first, second = read_tensors(path, [2, 0])
    assert same(first, samples[2])
    assert same(second, samples[0])
    assert first.token_ids.untyped_storage().nbytes() == 17 * 8  # it does not hold on to the rest of the group
    assert read_tensors(path, []) == []


def test_sampling_masks_come_back(tmp_path):
    samples = [masked(sample(7, 0)), sample(5, 1), masked(sample(4, 2)), masked(sample(9, 3))]
    write_group(tmp_path / "g.safetensors", samples, meta(samples))
    for indices in ([0, 1, 2, 3], [3], [2, 0], [1]):
        found = read_tensors(tmp_path / "g.safetensors", indices)
        assert all(same(one, samples[at]) for at, one in zip(indices, found, strict=True)), indices


def test_most_probable_tokens_come_back(tmp_path):
    samples = [sample(7, 0), sample(5, 1), masked(sample(4, 2))]
    samples[1:] = [replace(one, top_ids=torch.arange(3 * len(one.token_ids)).int().view(-1, 3)) for one in samples[1:]]
    path = tmp_path / "g000007.safetensors"
    write_group(path, samples, meta(samples))
    assert check_group(path).lengths == [7, 5, 4]
    samples[0] = replace(samples[0], top_ids=torch.full((7, 3), -1, dtype=torch.int32))
    for indices in ([0, 1, 2], [2], [2, 0]):
        found = read_tensors(path, indices)
        assert all(same(one, samples[at]) for at, one in zip(indices, found, strict=True)), indices


def test_what_rows_have_beside_their_tokens_comes_back(tmp_path):
    image = torch.arange(5000, dtype=torch.uint8).view(50, 25, 4)
    samples = [sample(length, seed) for seed, length in enumerate([7, 5, 4])]
    samples[0] = replace(samples[0], tensors={"image": image, "grid": torch.tensor([[1, 2, 3]])})
    samples[2] = replace(samples[2], tensors={"image": image.clone(), "latents": torch.rand(2, 3).half()})
    path = tmp_path / "g000007.safetensors"
    known = write_group(path, samples, meta(samples))
    assert path.stat().st_size < 8000  # an image of two rows is there once
    assert check_group(path, known) == known
    for indices in ([0, 1, 2], [2], [2, 0]):
        found = read_tensors(path, indices, known)
        assert all(same(one, samples[at]) for at, one in zip(indices, found, strict=True)), indices
    content = bytearray(path.read_bytes())
    content[content.index(bytes(range(100, 200)))] ^= 1
    path.write_bytes(content)
    for reading in (check_group, lambda path: read_tensors(path, [2])):
        with pytest.raises(DamagedError, match=r"tensor .* is not what was written"):
            reading(path)
    assert same(read_tensors(path, [1])[0], samples[1])


def test_hints_come_back(tmp_path):
    samples = [sample(7, 0), masked(sample(5, 1)), sample(4, 2), sample(3, 3)]
    for at, size, *wrong in ((0, 5, 3, 1), (1, 6), (3, 2)):
        others = tuple(torch.arange(other) + 10 * other for other in wrong)
        samples[at] = replace(samples[at], hint=Hint(torch.arange(size) + at, at, others))
    path = tmp_path / "g000007.safetensors"
    write_group(path, samples, meta(samples))
    assert check_group(path).lengths == [7, 5, 4, 3]
    for indices in ([0, 1, 2, 3], [3], [2, 1]):
        found = read_tensors(path, indices)
        assert all(same(one, samples[at]) for at, one in zip(indices, found, strict=True)), indices
    content = bytearray(path.read_bytes())
    places = [
        at
        for at in range(len(content))
        if content[at : at + 16] == (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    ]
    content[places[-1]] ^= 1  # of the last hint
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="row 3 is not what was written"):
        check_group(path)


def test_meta_needs_no_torch(group):
    path, _ = group
    code = (
        "import sys; from pathlib import Path; from hpcrl.data.group_file import check_group\n"
        "print(check_group(Path(sys.argv[1])).group_id, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["g000007", "False", "False"]


def test_writing_again_replaces(group):
    path, samples = group
    write_group(path, samples[:2], meta(samples[:2]))
    assert len(read_tensors(path)) == 2


def test_ragged_sample_is_a_bug_of_the_caller(tmp_path):
    bad = sample(5, 0)
    bad.rewards = bad.rewards[:4]
    with pytest.raises(AssertionError, match="ragged"):
        write_group(tmp_path / "g.safetensors", [bad], meta([sample(5, 0)]))
    assert list(tmp_path.iterdir()) == []


def with_header(content: bytes, change) -> bytes:
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def drop_samples(header: dict) -> None:
    header["__metadata__"]["hpcrl_group"] = json.dumps(
        {**json.loads(header["__metadata__"]["hpcrl_group"]), "samples": []}
    )


DAMAGE = {
    "empty": lambda _: b"",
    "cut in the size": lambda content: content[:5],
    "cut in the header": lambda content: content[:40],
    "cut in the tensors": lambda content: content[:-3],
    "zeros": lambda content: bytes(len(content)),
    "huge header": lambda content: b"\xff" * 8 + content[8:],
    "noise": lambda content: content[:8] + b"\xfe" * (len(content) - 8),
    "not a group": lambda content: with_header(content, lambda header: header.pop("__metadata__")),
    "no versions": lambda content: with_header(content, lambda header: header.pop("versions")),
    "fewer samples than lengths": lambda content: with_header(content, drop_samples),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_named(group, damage):
    path, _ = group
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(DataError, match=r"g000007\.safetensors is damaged"):
        read_tensors(path)


@pytest.mark.parametrize("damage", ["empty", "cut in the size", "cut in the header", "zeros", "huge header", "noise"])
def test_damaged_header_is_named(group, damage):
    path, _ = group
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(DataError, match="damaged"):
        check_group(path)


@pytest.mark.parametrize("read", [read_tensors, check_group])
def test_missing_file_is_named(tmp_path, read):
    with pytest.raises(DataError, match=r"nothing\.safetensors is missing"):
        read(tmp_path / "nothing.safetensors")


def bytes_read() -> int:
    """Return how many bytes this process has read by system calls."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def test_no_more_is_read_than_the_samples_wanted(tmp_path):
    samples = [sample(50_000, seed) for seed in range(16)]
    path = tmp_path / "g.safetensors"
    write_group(path, samples, meta(samples))
    read_tensors(path, [0])  # imports
    own = bytes_read()
    overhead = bytes_read() - own
    before = bytes_read()
    (found,) = read_tensors(path, [5])
    read = bytes_read() - before - overhead
    assert same(found, samples[5])
    assert read < path.stat().st_size / 12, "one of 16 samples, and the header twice"


def test_every_bit_of_rows_and_masks_is_looked_at(tmp_path: Path) -> None:
    samples = [masked(sample(5, 0)), sample(7, 1), masked(sample(9, 2))]
    path = tmp_path / "g000007.safetensors"
    known = write_group(path, samples, meta(samples))
    assert check_group(path, known) == known
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for at in range(header, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        for read in (check_group, read_tensors):
            with pytest.raises(DataError, match="damaged"):
                read(path)
