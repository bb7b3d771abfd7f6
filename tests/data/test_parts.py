"""Parts of a split, written as Hugging Face's `datasets` writes them."""

import json
from pathlib import Path

import pytest

from hpcrl.data.sources import Source
from hpcrl.errors import DataError

ROWS = 103
PARTS = (
    "[:10]",
    "[10:]",
    "[10:20]",
    "[-5:]",
    "[:-100]",
    "[-20:-10]",
    "[:10%]",
    "[33%:67%]",
    "[-10%:]",
    "[99:]",
    "[:103]",
    "[:104]",
    "[-104:]",
    "[:]",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in {"train-0": range(60), "train-1": range(60, ROWS)}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"at": row}) + "\n" for row in rows))
    return tmp_path


def bound(text: str) -> int | None:
    if not text:
        return None
    return round(int(text[:-1]) * ROWS / 100) if text.endswith("%") else int(text)


@pytest.mark.parametrize("part", PARTS)
def test_rows_of_a_part(part: str, folder: Path) -> None:
    first, last = map(bound, part[1:-1].split(":"))
    expected = list(range(ROWS))[first:last]
    source = Source(f"{folder}:train{part}")
    assert [row["at"] for row in source.rows()] == expected
    assert source.count() == len(expected)
    assert source.is_here()
    assert source.part == part


def test_tokens_of_another_part_are_others(folder: Path) -> None:
    assert Source(f"{folder}:train").part == ""
    (folder / "train[:3]").write_text("")  # a path that exists is no part of a split
    assert Source(f"{folder}/train[:3]").part == ""


@pytest.mark.released
@pytest.mark.parametrize("part", PARTS)
def test_datasets_gives_the_same_rows(part: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]

    found = load_dataset(str(folder), split=f"train{part}")["at"]
    assert [row["at"] for row in Source(f"{folder}:train{part}").rows()] == list(found)


@pytest.mark.parametrize("part", ["[20:10]", "[200:]", "[-3:-3]", "[99%:-50]"])
def test_a_part_without_rows_is_an_error(part: str, folder: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        list(Source(f"{folder}:train{part}").rows())
