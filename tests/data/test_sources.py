"""Where rows come from: files, folders, what Hugging Face's datasets has saved, and its hub's cache without network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpcrl.config.sections.data import DATASET_FILES
from hpcrl.data import sources
from hpcrl.data.sources import READERS, Source
from hpcrl.errors import DataError
from tests.paths import QUICKSTART

ROWS = [{"text": f"row {number}", "n": number} for number in range(3000)]


def write(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path)
        case ".arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, 700)
        case ".json":
            path.write_text(json.dumps(rows))
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl", ".arrow"])
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, suffix: str) -> None:
    source = Source(str(write(tmp_path / f"rows{suffix}", ROWS)))
    assert (list(source.rows()), source.count(), source.exists()) == (ROWS, 3000, True)
    assert list(Source(f"rows{suffix}", folder=str(tmp_path)).rows()) == ROWS


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize(("size", "read"), [(7, 7), (7.0, 7), (5000, 3000), (0.1, 300), (1e-9, 1)])
def test_the_first_rows_of_a_dataset_are_read(tmp_path: Path, suffix: str, size: float, read: int) -> None:
    source = Source(str(write(tmp_path / f"rows{suffix}", ROWS)), size=size)
    assert (list(source.rows()), source.count()) == (ROWS[:read], read)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".arrow"])
@pytest.mark.parametrize("others", [0, 30])
def test_a_row_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, others: int
) -> None:
    monkeypatch.setattr(sources, "_LARGEST_ROW", 20 << 20)
    source = Source(str(write(tmp_path / f"rows{suffix}", [*ROWS[:others], {"text": "a" * (40 << 20), "n": 0}])))
    with pytest.raises(DataError, match="expected rows of at most 20 MiB, found one of 4") as found:
        list(source.rows())
    assert str(tmp_path) in str(found.value)


def test_every_file_that_a_dataset_may_be_has_a_reader() -> None:
    assert tuple(READERS) == DATASET_FILES


def test_an_arrow_file_with_a_footer(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table)
    assert list(Source(str(tmp_path / "rows.arrow")).rows()) == ROWS


READ_ALL = """
import resource, sys
from hpcrl.data.sources import Source
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lengths = [len(row["messages"][0]["content"]) for row in Source(sys.argv[1]).rows()]
print(len(lengths), sum(lengths), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def conversations(path: Path, sizes: dict[int, int], **options: Any) -> Path:
    """Write one row group of conversations: by length of their text, how many."""
    schema = pa.schema([("messages", pa.list_(pa.struct([("content", pa.string())])))])
    with pq.ParquetWriter(path, schema, compression="zstd", write_statistics=False, **options) as file:
        rows = [pa.Table.from_pylist([{"messages": [{"content": "a" * size}]}], schema) for size in sizes]
        parts = [part for part, count in zip(rows, sizes.values(), strict=True) for _ in range(count)]
        file.write_table(pa.concat_tables(parts), row_group_size=10**6)
    return path


@pytest.mark.parametrize(
    ("sizes", "options", "most_mb"),
    [
        # Arrow holds at most 2 GiB of a nested text in a batch; a row group says nothing of texts that its dictionary has once
        pytest.param({2_200_000: 1000}, {}, 400, marks=pytest.mark.faults_slow, id="more than 2 GiB"),
        pytest.param({1_000_000: 256}, {"use_dictionary": False, "write_batch_size": 4}, 300, id="large rows"),
    ],
)
def test_rows_are_read_in_batches_of_bytes(
    tmp_path: Path, sizes: dict[int, int], options: dict[str, Any], most_mb: int
) -> None:
    path = conversations(tmp_path / "rows.parquet", sizes, **options)
    done = subprocess.run([sys.executable, "-c", READ_ALL, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, characters, peak_mb = map(int, done.stdout.split())
    assert (count, characters) == (sum(sizes.values()), sum(size * count for size, count in sizes.items()))
    assert peak_mb < most_mb


def test_large_rows_between_small_ones_are_read_once_and_in_order(tmp_path: Path) -> None:
    sizes = {10: 300, 3_000_000: 20, 11: 200}
    path = conversations(tmp_path / "rows.parquet", sizes, use_dictionary=False, write_batch_size=1)
    lengths = [len(row["messages"][0]["content"]) for row in Source(str(path)).rows()]
    assert lengths == [size for size, count in sizes.items() for _ in range(count)]


def test_what_datasets_has_saved(tmp_path: Path) -> None:
    for split, part in (("train", ROWS[:2000]), ("test", ROWS[2000:])):
        names = [write(tmp_path / split / f"data-{at:05d}-of-00002.arrow", part[at::2]).name for at in range(2)]
        (tmp_path / split / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": name} for name in names]})
        )
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(Source(f"{tmp_path}:test").rows()) == [*ROWS[2000::2], *ROWS[2001::2]]
    assert Source(str(tmp_path / "train")).count() == 2000
    assert Source(str(tmp_path), split="train").count() == 2000, "the split of training data, where none is named"
    with pytest.raises(DataError, match=f"it has several splits; name one of train, test as {tmp_path}:train"):
        list(Source(str(tmp_path)).rows())
    with pytest.raises(DataError, match="it has no split 'dev'"):
        list(Source(f"{tmp_path}:dev").rows())


@pytest.mark.parametrize("name", ["../x.arrow", "/x.arrow", 5, None, "a/../../x.arrow"])
@pytest.mark.parametrize(
    "form", ['{"_data_files": [{"filename": %s}]}', '{"_data_files": %s}', "[%s]", "[" * 100_000 + "%s"]
)
def test_what_datasets_has_saved_names_files_of_its_own(tmp_path: Path, form: str, name: object) -> None:
    (tmp_path / "state.json").write_text(form % json.dumps(name))
    with pytest.raises(
        DataError, match=r"dataset .*state.json: (_data_files: )?expected a (list of names below|JSON object)"
    ):
        Source(str(tmp_path)).files()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../other"]}')
    with pytest.raises(DataError, match=r"dataset_dict.json: splits: expected a list of names below"):
        Source(str(tmp_path)).files()


def test_a_folder_of_files_has_the_splits_that_their_names_say(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:10])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[10:15])
    write(tmp_path / "data" / "test-00000-of-00001.jsonl", ROWS[20:])
    write(tmp_path / ".cache" / "train.jsonl", ROWS)
    assert list(Source(f"{tmp_path}:train").rows()) == ROWS[:15]
    assert list(Source(f"{tmp_path}:test").rows()) == ROWS[20:]
    with pytest.raises(DataError, match="it has several splits"):
        Source(str(tmp_path)).files()
    write(tmp_path / "plain" / "a.jsonl", ROWS[:1])
    write(tmp_path / "plain" / "b.jsonl", ROWS[1:2])
    assert list(Source(str(tmp_path / "plain")).rows()) == ROWS[:2]


README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: other
  data_files: other/all.jsonl
---
# Rows
"""


def hub(home: Path, revision: str, files: dict[str, list], ref: str = "main") -> None:
    """Lay out the hub's cache as a download leaves it."""
    folder = home / "hub" / "datasets--owner--rows"
    snapshot = folder / "snapshots" / revision
    for name, rows in files.items():
        write(snapshot / name, rows)
    (snapshot / "README.md").write_text(README)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(revision)


READ = """
import sys
from hpcrl.data.sources import Source
from hpcrl.errors import DataError
from tests.paths import QUICKSTART
location, subset, revision = (word or None for word in sys.argv[1:])
try:
    print(len(list(Source(location, subset, revision, split="train").rows())))
except DataError as error:
    print(error)
"""


def test_a_dataset_of_the_hub_is_found_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"main/train-0.parquet": ROWS[:7], "main/test-0.parquet": ROWS[:3], "other/all.jsonl": ROWS[:2]}
    hub(tmp_path, "a" * 40, old, "v1")
    hub(tmp_path, "b" * 40, {**old, "main/train-1.parquet": ROWS[:5]})
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def read(location: str, subset: str = "", revision: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-c", READ, location, subset, revision], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert read("owner/rows:train", "main") == "12"
    assert read("owner/rows", "main", "v1") == "7", "of another revision"
    assert read("owner/rows:test", "main") == "3"
    assert read("owner/rows", "other") == "2"
    assert "it has several subsets; set data.subset" in read("owner/rows")
    assert "the hub does not give one of that name (revision main)" in read("owner/none")


def test_what_is_no_dataset_is_told(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for location, message in (
        (str(empty), "has no rows"),
        (str(tmp_path / "none.jsonl"), "no such file"),
        (str(write(tmp_path / "rows.csv", ROWS[:1])), "expected a .parquet, .json, .jsonl or .arrow file"),
    ):
        with pytest.raises(DataError, match=message):
            list(Source(location).rows())


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    text = json.dumps({"a": 1})
    file.write_bytes(b"\xef\xbb\xbf" + (f"[{text}]" if suffix == ".json" else f"{text}\r\n").encode())
    assert list(Source(str(file)).rows()) == [{"a": 1}]


@pytest.mark.faults_slow
def test_reinforcement_learning_reads_a_subset_and_a_revision_of_the_hub(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + {n}", "reward_spec": {"ground_truth": str(2 * n)}} for n in range(40)]
    of_main = {"main/train-0.jsonl": rows, "main/test-0.jsonl": rows[:9]}
    hub(tmp_path, "a" * 40, {**of_main, "other/all.jsonl": rows[:3]}, "v1")
    hub(tmp_path, "b" * 40, of_main)
    asked = (
        'data.train_data=["owner/rows"]', 'data.val_data=["owner/rows:test"]', "environment.env_class=gsm8k",
        "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "generator.n_samples_per_prompt=2",
    )  # fmt: skip

    def check(*settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcrl.cli.main", "data", "check", str(QUICKSTART), *asked, *settings]
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        environment.pop("HF_HUB_CACHE", None)
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    chosen = check("data.subset=main", "data.revision=v1", "data.val_subset=main", "data.val_size=4")
    assert "owner/rows: 40 prompts" in chosen.stdout, chosen
    assert "owner/rows:test: 4 prompts" in chosen.stdout
    assert "owner/rows: 3 prompts" in check("data.subset=other", "data.revision=v1", "data.val_subset=main").stdout
    assert (
        "set data.subset (of validation data: data.val_subset) to one of main, other"
        in check("data.revision=v1").stdout
    )
