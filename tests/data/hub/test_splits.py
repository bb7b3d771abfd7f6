"""Files of the splits of a dataset folder, against those that Hugging Face's `datasets` finds.

The lists below are what `load_dataset_builder(folder, subset).config.data_files` of `datasets` 5.2.0 (fsspec 2026.9.0) gave for a folder of
these files, each of one JSON line, and this front matter; None: it raised an error. Where the package is there, it is asked again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcrl.data.hub.splits import chosen_subset, covering, default_patterns, names_below
from hpcrl.data.sources import Source
from hpcrl.errors import DataError

Splits = Mapping[str, list[str]]


@dataclass(frozen=True)
class Case:
    """A dataset folder, the subset that is wanted of it, and its splits."""

    name: str
    files: str
    front: str | None
    subset: str | None
    splits: Splits | None

    def make(self, folder: Path) -> Path:
        for name in self.files.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text('{"a": 1}\n')
        if self.front is not None:
            (folder / "README.md").write_text(f"---\n{self.front}\n---\n# Rows\n")
        return folder


def of(patterns: str) -> str:
    """Return the front matter of one subset with such data_files."""
    return f"configs:\n- config_name: x\n  data_files: {patterns}"


CASES = [
    Case("star_stays_in_its_folder", "a.jsonl d/b.jsonl", of("'*'"), None, {"train": ["a.jsonl"]}),
    Case(
        "two_stars_at_the_end",
        "d/b.jsonl d/e/c.jsonl x.jsonl",
        of("d/**"),
        None,
        {"train": ["d/b.jsonl", "d/e/c.jsonl"]},
    ),
    Case(
        "two_stars_are_no_folder_too",
        "train.jsonl d/train.jsonl d/e/train.jsonl",
        of("'**/train.jsonl'"),
        None,
        {"train": ["d/e/train.jsonl", "d/train.jsonl", "train.jsonl"]},
    ),
    Case(
        "two_stars_in_the_middle",
        "train.jsonl d/train.jsonl d/e/train.jsonl",
        of("d/**/train.jsonl"),
        None,
        {"train": ["d/e/train.jsonl", "d/train.jsonl"]},
    ),
    Case(
        "order_of_texts",
        "a-b/x.jsonl a/x.jsonl a.jsonl B.jsonl",
        of("'**'"),
        None,
        {"train": ["B.jsonl", "a-b/x.jsonl", "a.jsonl", "a/x.jsonl"]},
    ),
    Case(
        "order_of_patterns_and_a_file_twice",
        "data/a.jsonl data/b.jsonl",
        of("[data/b.jsonl, 'data/*']"),
        None,
        {"train": ["data/b.jsonl", "data/a.jsonl", "data/b.jsonl"]},
    ),
    Case(
        "order_of_shards",
        "p-10.jsonl p-9.jsonl p-1.jsonl",
        of("'p-*'"),
        None,
        {"train": ["p-1.jsonl", "p-10.jsonl", "p-9.jsonl"]},
    ),
    Case(
        "splits_and_lists",
        "a.jsonl b.jsonl",
        "configs:\n- config_name: x\n  data_files:\n  - split: test\n    path: b.jsonl\n  - split: train\n    path: [b.jsonl, a.jsonl]",
        None,
        {"test": ["b.jsonl"], "train": ["b.jsonl", "a.jsonl"]},
    ),
    Case("dot_slash", "data/a.jsonl", of("./data/*.jsonl"), None, {"train": ["data/a.jsonl"]}),
    Case(
        "hidden",
        "x.jsonl .h/a.jsonl b/.c.jsonl __pycache__/d.jsonl _y/e.jsonl",
        of("'**'"),
        None,
        {"train": ["_y/e.jsonl", "x.jsonl"]},
    ),
    Case(
        "hidden_where_it_is_named",
        ".h/a.jsonl b/.c.jsonl b/d.jsonl __x/e.jsonl",
        of("['.h/*', 'b/.*', '__x/*']"),
        None,
        {"train": [".h/a.jsonl", "b/.c.jsonl", "__x/e.jsonl"]},
    ),
    Case(
        "question_mark_and_classes",
        "a1.jsonl a2.jsonl a12.jsonl b1.jsonl a^.jsonl",
        of("['a?.jsonl', 'a[!1].jsonl', '[b-z]1.jsonl', 'a[^1].jsonl']"),
        None,
        {"train": ["a1.jsonl", "a2.jsonl", "a^.jsonl", "a2.jsonl", "a^.jsonl", "b1.jsonl", "a1.jsonl", "a^.jsonl"]},
    ),
    Case(
        "what_holds_no_rows",
        "a.jsonl LICENSE x.py .gitattributes config.json dataset_info.json",
        of("'*'"),
        None,
        {"train": ["a.jsonl"]},
    ),
    Case("a_name_that_is_asked_for", "config.json a.json", of("config.json"), None, {"train": ["config.json"]}),
    Case("a_pattern_without_files", "a.jsonl", of("[a.jsonl, 'b*.jsonl']"), None, {"train": ["a.jsonl"]}),
    Case(
        "a_folder_of_the_subset",
        "d/a.jsonl e/b.jsonl",
        "configs:\n- config_name: x\n  data_dir: d",
        None,
        {"train": ["d/a.jsonl"]},
    ),
    Case(
        "patterns_from_that_folder",
        "d/a.jsonl d/b.jsonl a.jsonl",
        "configs:\n- config_name: x\n  data_dir: d\n  data_files: 'a*'",
        None,
        {"train": ["d/a.jsonl"]},
    ),
    Case(
        "a_subset_without_files",
        "train.jsonl test.jsonl",
        "configs:\n- config_name: x",
        None,
        {"train": ["train.jsonl"], "test": ["test.jsonl"]},
    ),
    Case(
        "the_default",
        "a.jsonl b.jsonl",
        "configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files: b.jsonl\n  default: true",
        None,
        {"train": ["b.jsonl"]},
    ),
    Case(
        "one_called_default",
        "a.jsonl b.jsonl",
        "configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: default\n  data_files: b.jsonl",
        None,
        {"train": ["b.jsonl"]},
    ),
    Case(
        "a_named_subset",
        "a.jsonl b.jsonl",
        "configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: default\n  data_files: b.jsonl",
        "x",
        {"train": ["a.jsonl"]},
    ),
    Case(
        "no_default",
        "a.jsonl",
        "configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files: a.jsonl",
        None,
        None,
    ),
    Case(
        "two_defaults",
        "a.jsonl",
        "configs:\n- config_name: x\n  data_files: a.jsonl\n  default: true\n- config_name: default\n  data_files: a.jsonl",
        None,
        None,
    ),
    Case(
        "no_such_subset",
        "a.jsonl",
        "configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files: a.jsonl",
        "z",
        None,
    ),
    Case("a_subset_where_none_is_named", "a.jsonl", None, "foo", None),
    Case("a_file_that_is_not_there", "a.jsonl", of("[a.jsonl, b.jsonl]"), None, None),
    Case("nothing_there", "a.jsonl", of("'b*.jsonl'"), None, None),
    Case("splits_as_a_mapping", "a.jsonl", of("{train: a.jsonl}"), None, None),
    Case("a_split_with_a_dash", "a.jsonl", of("[{split: a-b, path: a.jsonl}]"), None, None),
    Case("two_stars_beside_letters", "ab.jsonl a/b.jsonl", of("a**b.jsonl"), None, None),
    Case("no_configs", "train.jsonl", "license: mit", None, {"train": ["train.jsonl"]}),
    Case(
        "shards",
        "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/test.parquet data/dev-00000-of-00001.parquet",
        None,
        None,
        {
            "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            "dev": ["data/dev-00000-of-00001.parquet"],
        },
    ),
    Case(
        "shards_of_other_splits",
        "data/train_sft-00000-of-00002.parquet data/test_sft-00000-of-00001.parquet",
        None,
        None,
        {"test_sft": ["data/test_sft-00000-of-00001.parquet"], "train_sft": ["data/train_sft-00000-of-00002.parquet"]},
    ),
    Case(
        "shards_elsewhere",
        "x/data/train-00000-of-00001.parquet y.parquet",
        None,
        None,
        {"train": ["x/data/train-00000-of-00001.parquet"]},
    ),
    Case(
        "words_of_splits",
        "training.jsonl validation_1.jsonl evaluation.jsonl my-train.jsonl trainer.jsonl",
        None,
        None,
        {
            "train": ["my-train.jsonl", "training.jsonl"],
            "validation": ["validation_1.jsonl"],
            "test": ["evaluation.jsonl"],
        },
    ),
    Case("words_in_capitals", "Train.jsonl Test.jsonl", None, None, {"train": ["Test.jsonl", "Train.jsonl"]}),
    Case(
        "folders_of_splits",
        "train/a.jsonl valid/b.jsonl test/c.jsonl",
        None,
        None,
        {"train": ["train/a.jsonl"], "validation": ["valid/b.jsonl"], "test": ["test/c.jsonl"]},
    ),
    Case(
        "folders_before_files",
        "train/test.jsonl test/train.jsonl",
        None,
        None,
        {"train": ["train/test.jsonl"], "test": ["test/train.jsonl"]},
    ),
    Case(
        "words_in_folders", "x-train-y/train.jsonl train-test.jsonl", None, None, {"train": ["x-train-y/train.jsonl"]}
    ),
    Case(
        "all_is_train",
        "a.jsonl b/c.jsonl .h.jsonl __x__/d.jsonl _y/e.jsonl",
        None,
        None,
        {"train": ["_y/e.jsonl", "a.jsonl", "b/c.jsonl"]},
    ),
    Case(
        "most_files_are_of_one_kind",
        "train.jsonl x/train2.jsonl train.parquet train.json",
        None,
        None,
        {"train": ["train.json", "train.jsonl", "x/train2.jsonl"]},
    ),
    Case("as_many_of_each_kind", "a.jsonl b.parquet c.txt", None, None, {"train": ["b.parquet"]}),
    Case(
        "a_name_that_is_two_splits",
        "train-test.jsonl",
        None,
        None,
        {"train": ["train-test.jsonl"], "test": ["train-test.jsonl"]},
    ),
]
"""Of `datasets`."""


def splits(folder: Path, subset: str | None) -> dict[str, list[str]]:
    """Return the files of each split that hpcrl finds."""
    named = chosen_subset(folder, subset)
    start = folder / (named.folder if named else "")
    names = (named and named.splits) or default_patterns(names_below(start))
    found = {split: Source(f"{folder}:{split}", subset).files() for split in names}
    return {split: [str(path.relative_to(folder)) for path in files] for split, files in found.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_splits_are_those_that_datasets_finds(case: Case, tmp_path: Path) -> None:
    folder = case.make(tmp_path)
    if case.splits is None:
        with pytest.raises(DataError, match=f"^dataset {folder}"):
            Source(str(folder), case.subset, split="train").files()
    else:
        assert splits(folder, case.subset) == case.splits


@pytest.mark.released
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_datasets_finds_here(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    from datasets import load_dataset_builder  # pyright: ignore[reportMissingImports]

    folder = case.make(tmp_path / "rows")
    try:
        found = load_dataset_builder(str(folder), case.subset).config.data_files
    except (ValueError, OSError):
        found = None
    root = os.path.realpath(folder)
    there = found and {str(split): [os.path.relpath(file, root) for file in files] for split, files in found.items()}
    assert there == case.splits


SUBSETS = """configs:
- config_name: main
  data_files: main.jsonl
- config_name: other
  data_files: [a.jsonl, gone.jsonl]
- config_name: away
  data_files: ../rows/*.jsonl"""


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        (
            None,
            "it has several subsets; set data.subset (of validation data: data.val_subset) to one of main, other, away",
        ),
        (
            "third",
            "it has no subset 'third'; set data.subset (of validation data: data.val_subset) to one of main, other, away",
        ),
        ("other", "its README names gone.jsonl, which is not there, or no file of rows"),
        ("away", "its README names ../rows/*.jsonl, which is outside of its folder; name that file itself"),
    ],
)
def test_what_cannot_be_found_is_named(subset: str | None, message: str, tmp_path: Path) -> None:
    folder = Case("", "a.jsonl main.jsonl", SUBSETS, None, None).make(tmp_path)
    with pytest.raises(DataError) as error:
        Source(str(folder), subset).files()
    assert str(error.value) == f"dataset {folder}: {message}"


def test_files_that_hpcrl_does_not_read_are_no_silence(tmp_path: Path) -> None:
    folder = Case("", "a.jsonl b.csv c.csv", None, None, None).make(tmp_path)
    with pytest.raises(DataError, match=r"split train of .* has b\.csv, which hpcrl does not read; expected \.parquet"):
        Source(str(folder)).files()


def test_patterns_for_a_download_match_at_least_what_is_read() -> None:
    assert covering(["./data/**/train-*.parquet", "a.jsonl"], "d") == ["d/data/*train-*.parquet", "d/a.jsonl"]
    assert covering(["**/*.jsonl"], "") == ["**.jsonl"]


BOMB = "\n".join([f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" if n else "a0: &a0 [x]" for n in range(40)])
"""A list of 9^39 entries, to whoever writes it out."""


@pytest.mark.parametrize(
    ("front", "told"),
    [
        ("[" * 100_000, "nested more than 40 levels deep"),
        ("configs: " + "{a: " * 50 + "1" + "}" * 50, "nested more than 40 levels deep"),
        ("configs: 5", "expected a list of config_name and data_files"),
        ("configs: {a: b}", "expected a list of config_name and data_files"),
        (f"{BOMB}\nconfigs: [{{config_name: x, data_files: *a39}}]", "expected a list of config_name and data_files"),
        (f"{BOMB}\nconfigs: [{{config_name: *a39}}]", "expected a list of config_name and data_files"),
        (f"{BOMB}\nconfigs: [{{config_name: x, data_dir: *a39}}]", "expected a list of config_name and data_files"),
        ("configs: [{config_name: x, data_dir: ../y}]", "names the folder '../y', which is outside of its own"),
        ("configs: [{config_name: x, data_dir: /etc}]", "names the folder '/etc', which is outside of its own"),
        ("at: 2020-13-45", "is no YAML"),
    ],
)
def test_front_matter_of_another_shape(tmp_path: Path, front: str, told: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    with pytest.raises(DataError, match=re.escape(f"dataset {tmp_path}: ")) as error:
        Source(str(tmp_path)).files()
    assert told in str(error.value)
    assert len(str(error.value)) < 1000
