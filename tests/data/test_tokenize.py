"""Datasets become tokens once: complete or not at all, in the order of their rows, whoever makes them, and each row known by its checksum."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from hpcrl.config import Config
from hpcrl.controller.dataset_rows import DatasetRows
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.data.group_file import read_group
from hpcrl.data.sources import Source
from hpcrl.data.token_file import open_tokens
from hpcrl.data.tokenize import (
    Recipe,
    Rows,
    Tokenizer,
    tokenize_datasets,
    tokenized,
    training_rows,
    validation_rows,
)
from hpcrl.errors import DamagedError, DataError
from hpcrl.rundir.layout import Run
from tests.paths import CONFIGS, ROOT
from tests.processes import is_gone

_ATTEMPTS = count(1)
LETTERS = "abcdefghijkl"


def talk(question: str, answer: str) -> dict:
    return {"conversations": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


TALKS = [talk(LETTERS[at % 7 : at % 7 + 3], LETTERS[: 1 + at % 11]) for at in range(600)]


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(*overrides: str) -> Config:
    return Config.from_toml([CONFIGS / "sft_tiny.toml"], overrides)


def made(run: Run, source: str, *overrides: str):
    recipe = Recipe.of(config(*overrides))
    return Tokenizer(run, next(_ATTEMPTS), recipe).dataset("train-0", "rows", Source(source))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_rows_are_read_as_they_were_made(run: Run, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", TALKS)
    file, expected = made(run, source), list(tokenized(Source(source), Recipe.of(config())))
    assert len(file) == len(TALKS) == len(expected)
    for at, (row,) in enumerate(expected):
        (found,) = file.read(at, file.digest(at))
        assert found.token_ids.tolist() == row.token_ids
        assert found.loss_mask.astype(bool).tolist() == row.mask
        assert (file.lengths(at), file.trained(at)) == ([len(row.token_ids)], [row.trained])
        assert (found.versions == -1).all()
        assert not found.rollout_logprobs.any()


def test_a_later_attempt_finds_what_an_earlier_one_made(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    first = made(run, write(source, TALKS))
    before = first.path.stat().st_mtime_ns
    source.unlink()
    assert made(run, str(source)).path.stat().st_mtime_ns == before, "the source is not looked at any more"
    with pytest.raises(DataError, match="no such file"):
        made(run, str(source), "data.train_on_what=all")


def test_several_processes_make_the_same_in_the_same_order(tmp_path: Path) -> None:
    source, recipe = Source(write(tmp_path / "rows.jsonl", TALKS)), Recipe.of(config())
    assert list(tokenized(source, recipe, workers=2, ahead=1)) == list(tokenized(source, recipe))
    bad = Source(write(tmp_path / "bad.jsonl", [*TALKS, {"conversations": 3}]))
    with pytest.raises(DataError, match=r"bad.jsonl, row 600: expected a list of chat messages, found 3"):
        list(tokenized(bad, recipe, workers=1))


KILLED = """
import multiprocessing, os, signal, sys
from hpcrl.config import Config
from hpcrl.data.sources import Source
from hpcrl.data.tokenize import Recipe, tokenized

if __name__ == "__main__":
    rows = tokenized(Source(sys.argv[1]), Recipe.of(Config.from_toml([sys.argv[2]])), workers=1, ahead=1)
    next(rows)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_further_processes_end_with_the_one_that_they_make_rows_for(tmp_path: Path) -> None:
    program, source = tmp_path / "program.py", write(tmp_path / "rows.jsonl", TALKS)
    program.write_text(KILLED)
    command = [sys.executable, str(program), source, str(CONFIGS / "sft_tiny.toml")]
    with (tmp_path / "worker").open("w") as out:  # of a pipe the worker would have an end
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=out, check=False)
    worker = int((tmp_path / "worker").read_text())
    try:
        deadline = time.monotonic() + 30
        while not is_gone(worker):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_long_rows_are_cut_dropped_or_refused_and_counted(run: Run, tmp_path: Path) -> None:
    rows = [talk("ab", "c"), talk("ab", "cdefghij"), talk("abcdefghijkl", "c")]  # 7, 14 and 17 tokens
    source = write(tmp_path / "rows.jsonl", rows)
    longest = "trainer.max_length=10"
    cut = made(run, source, longest)
    assert [cut.lengths(at) for at in range(len(cut))] == [[7], [10]]
    counts = cut.facts["counts"]
    assert (counts["rows"], counts["cut"], counts["dropped"], counts["untrained"], counts["longest"]) == (
        2,
        2,
        0,
        1,
        17,
    )
    counts = made(run, source, longest, "data.too_long=drop").facts["counts"]
    assert (counts["rows"], counts["cut"], counts["dropped"], counts["untrained"]) == (1, 0, 2, 0)
    with pytest.raises(DataError, match=r"a row has 14 tokens, more than trainer.max_length = 10"):
        made(run, source, longest, "data.too_long=refuse")
    with pytest.raises(DataError, match="no row is left"):
        made(run, source, "trainer.max_length=3")


def test_a_damaged_row_is_seen(run: Run, tmp_path: Path) -> None:
    file = made(run, write(tmp_path / "rows.jsonl", TALKS))
    path, good = file.path / "tokens.i32", [file.digest(at) for at in range(3)]
    content = np.fromfile(path, "<i4")
    content[file.lengths(0)[0]] += 1
    content.tofile(path)
    open_tokens.cache_clear()
    again = open_tokens(file.path)
    assert again.read(0, good[0])[0].token_ids.tolist()
    with pytest.raises(DamagedError, match=r"row 1 of .* is damaged"):
        again.read(1, good[1])
    with pytest.raises(DamagedError, match="not the one that the batch was composed of"):
        again.read(0, good[2])
    content[:-1].tofile(path)
    open_tokens.cache_clear()
    with pytest.raises(DamagedError, match=r"expected .* bytes"):
        open_tokens(file.path)


def test_the_first_rows_are_set_aside(run: Run, tmp_path: Path) -> None:
    files = [write(tmp_path / name, TALKS[:count]) for name, count in (("a.jsonl", 5), ("b.jsonl", 20))]
    asked = config(
        f"data.train_data={json.dumps(files)}", "data.val_data=[]", "data.test_size=8", "trainer.eval_interval=5"
    )
    tokenize_datasets(asked, Tokenizer(run, 1, Recipe.of(asked)))
    assert [rows.places for rows in training_rows(run, asked.data)] == [range(5, 5), range(3, 20)]
    (aside,) = validation_rows(run, asked.data).values()
    assert [rows.places for rows in aside] == [range(5), range(3)]


def test_validation_sets_have_the_names_of_their_files(run: Run, tmp_path: Path) -> None:
    train, math, code = (write(tmp_path / f"{name}.jsonl", TALKS[:9]) for name in ("train", "math", "code"))
    asked = config(f"data.train_data=['{train}']", f"data.val_data=['{math}', '{code}']", "trainer.eval_interval=5")
    tokenize_datasets(asked, Tokenizer(run, 1, Recipe.of(asked)))
    assert list(validation_rows(run, asked.data)) == ["math", "code"]


def test_what_is_damaged_is_made_again_by_the_next_attempt(run: Run, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", TALKS)
    file = made(run, source)
    good = (file.path / "mask.u8").read_bytes()
    (file.path / "mask.u8").write_bytes(bytes([1 - good[0]]) + good[1:])
    assert (made(run, source).path / "mask.u8").read_bytes() == good


def pair(prompt: str, chosen: str, rejected: str) -> dict:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def of_pairs(run: Run, source: str, *overrides: str):
    recipe = Recipe.of(Config.from_toml([CONFIGS / "dpo_tiny.toml"], overrides))
    return Tokenizer(run, next(_ATTEMPTS), recipe).dataset("train-0", "rows", Source(source))


def test_a_pair_is_one_row_of_two_sequences(run: Run, tmp_path: Path) -> None:
    rows = [pair(LETTERS[at % 7 : at % 7 + 3], LETTERS[: 1 + at % 5], LETTERS[: 2 + at % 3]) for at in range(30)]
    file = of_pairs(run, write(tmp_path / "pairs.jsonl", rows))
    assert (len(file), file.sequences) == (30, 2)
    for at, row in enumerate(rows):
        chosen, rejected = file.read(at, file.digest(at))
        assert file.lengths(at) == [len(chosen.token_ids), len(rejected.token_ids)]
        assert file.trained(at) == [len(row["chosen"]) + 1, len(row["rejected"]) + 1]
        assert [int(sample.loss_mask.sum()) for sample in (chosen, rejected)] == file.trained(at)
    pairs = DatasetRows(run, [Rows(file, range(30))], [], 5).in_order(PromptStream(30, 10, 5, None))
    group = pairs(3, 0)
    assert (group.row, group.rewards, group.owners) == (3, [1.0, 0.0], [0, 1])
    assert (group.lengths, group.response_lengths) == (file.lengths(3), file.trained(3))
    (alone,) = read_group(run.inside(group.path), [1], group)
    assert alone.token_ids.tolist() == file.read(3)[1].token_ids.tolist()
    assert len({file.digest(at) for at in range(30)}) == len({json.dumps(row) for row in rows})
    content = np.fromfile(file.path / "tokens.i32", "<i4")
    content[sum(file.lengths(0)) - 1] += 1  # of the rejected answer
    content.tofile(file.path / "tokens.i32")
    open_tokens.cache_clear()
    with pytest.raises(DamagedError, match=r"row 0 of .* is damaged"):
        open_tokens(file.path).read(0)


def test_a_pair_may_have_a_margin(run: Run, tmp_path: Path) -> None:
    rows = [pair("ab", "a", "b") | {"margin": margin} for margin in (0.5, 0, -2.25)]
    mode = ["trainer.mode=reward_model", "trainer.dpo.loss_type=['sigmoid']", "trainer.dpo.loss_weights=[]"]
    of_scores = [*mode, "data.margin_column=margin"]
    file = of_pairs(run, write(tmp_path / "pairs.jsonl", rows), *of_scores)
    for at, row in enumerate(rows):
        chosen, rejected = file.read(at, file.digest(at))
        assert (float(chosen.rewards[-1]), float(chosen.rewards.sum())) == (row["margin"], row["margin"])
        assert not rejected.rewards.any()
    assert len({file.digest(at) for at in range(3)}) == 3
    index = np.load(file.path / "rows.npy")
    index["margin"][0] = 0.25
    np.save(file.path / "rows.npy", index)
    open_tokens.cache_clear()
    with pytest.raises(DamagedError, match=r"row 0 of .* is damaged"):
        open_tokens(file.path).read(0)
    for wrong in ("big", True, float("inf")):
        source = write(tmp_path / "wrong.jsonl", [pair("ab", "a", "b") | {"margin": wrong}])
        with pytest.raises(DataError, match="row 0: column `margin`: expected a finite number"):
            of_pairs(run, source, *of_scores)
    with pytest.raises(DataError, match=r"no column `margin` \(data.margin_column\)"):
        of_pairs(run, write(tmp_path / "none.jsonl", [pair("ab", "a", "b")]), *of_scores)


def test_of_long_pairs_both_answers_are_cut_or_neither_is_there(run: Run, tmp_path: Path) -> None:
    rows = [
        pair("ab", "c", "d"),
        pair("ab", "c", "cdefghij"),
        pair("abcdefghijkl", "c", "d"),
        pair("ab", "cdefghijk", "c"),
    ]
    source, longest = write(tmp_path / "pairs.jsonl", rows), "trainer.max_length=10"
    cut = of_pairs(run, source, longest)
    assert [cut.lengths(at) for at in range(len(cut))] == [[7, 7], [7, 10], [10, 7]]
    counts = cut.facts["counts"]
    assert [counts[name] for name in ("rows", "cut", "dropped", "untrained", "longest")] == [3, 3, 0, 1, 17]
    assert (counts["tokens"], counts["trained"]) == (48, 4 + 2 + 5 + 5 + 2)
    dropped = of_pairs(run, source, longest, "data.too_long=drop")
    assert [dropped.lengths(at) for at in range(len(dropped))] == [[7, 7]]
    with pytest.raises(DataError, match="a row has 14 tokens"):
        of_pairs(run, source, longest, "data.too_long=refuse")
