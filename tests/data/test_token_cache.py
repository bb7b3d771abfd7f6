"""Tokens that runs share: each run has what it would have made itself, whoever made it, whatever became of the cache."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

import pytest

import hpcrl.data.token_cache
from hpcrl.config import Config
from hpcrl.data.sources import Source
from hpcrl.data.token_cache import RECORD, TokenCache, key_of
from hpcrl.data.token_file import TokenFile, open_tokens
from hpcrl.data.tokenize import Recipe, Tokenizer, shared_facts
from hpcrl.rundir.layout import Run, token_cache
from tests.data.test_tokenize import LETTERS, TALKS, talk, write
from tests.paths import CONFIGS

ROWS = TALKS[:40]
QUICKSTART = CONFIGS / "quickstart" / "model"
FILES = ("tokens.i32", "mask.u8", "rows.npy")


def config(*overrides: str) -> Config:
    return Config.from_toml([CONFIGS / "sft_tiny.toml"], overrides)


def made(root: Path, name: str, source: str, *overrides: str, cached: bool = True) -> TokenFile:
    cache = TokenCache(token_cache(root)) if cached else None
    tokenizer = Tokenizer(Run(root / "project" / name), 1, Recipe.of(config(*overrides)), cache=cache)
    return tokenizer.dataset("train-0", name, Source(source))


def contents(file: TokenFile) -> list[bytes]:
    return [(file.path / name).read_bytes() for name in FILES]


def entries(root: Path) -> list[Path]:
    return sorted(token_cache(root).iterdir()) if token_cache(root).exists() else []


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What a run makes of the same rows without a cache."""
    place = tmp_path_factory.mktemp("uncached")
    return contents(made(place, "alone", write(place / "rows.jsonl", ROWS), cached=False))


def test_another_run_has_the_same_files_under_names_of_its_own(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = made(tmp_path, "alone", source, cached=False)
    assert not entries(tmp_path)
    first, second = made(tmp_path, "first", source), made(tmp_path, "second", source)
    (entry,) = entries(tmp_path)
    assert f"40 rows, {alone.facts['counts']['tokens']:,} tokens" in capsys.readouterr().out.splitlines()[-1]
    assert contents(second) == contents(first) == contents(alone)
    assert second.facts["counts"] == alone.facts["counts"]
    assert (first.name, second.name) == ("first", "second")
    assert {(file.path / name).stat().st_ino for file in (first, second) for name in FILES[:1]} == {
        (entry / FILES[0]).stat().st_ino
    }
    assert token_cache(tmp_path).stat().st_mode & 0o777 == 0o700
    shutil.rmtree(token_cache(tmp_path))
    open_tokens.cache_clear()
    assert [open_tokens(second.path).read(at)[0].token_ids.tolist() for at in range(40)] == [
        alone.read(at)[0].token_ids.tolist() for at in range(40)
    ]
    assert made(tmp_path, "second", source).path == second.path, "a later attempt has its own"
    assert not entries(tmp_path)


TEMPLATE = (QUICKSTART / "chat_template.jinja").read_text()


def key(source: Source | str, *overrides: str) -> str:
    return key_of(shared_facts(Source(source) if isinstance(source, str) else source, Recipe.of(config(*overrides))))


def model(place: Path, change: str = "") -> str:
    shutil.copytree(QUICKSTART, place)
    if change == "vocabulary":
        file = place / "tokenizer.json"
        content = json.loads(file.read_text())
        vocabulary = content["model"]["vocab"]
        names = [name for name in vocabulary if len(name) == 1][:2]
        vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
        file.write_text(json.dumps(content))
    if change == "template":
        (place / "chat_template.jinja").write_text(f"{TEMPLATE} ")
    if change == "weights":
        (place / "model.safetensors").write_bytes(b"other")
    return f"trainer.policy.model.path={place}"


def test_all_that_decides_what_tokens_are_makes_another_entry(tmp_path: Path, source: str) -> None:
    (tmp_path / "t.jinja").write_text(f"{TEMPLATE}  ")
    rows = json.dumps([*ROWS[:-1], talk("ab", "ba")])
    others = [
        key(write(tmp_path / "fewer.jsonl", ROWS[:-1])),
        key(write(tmp_path / "turned.jsonl", ROWS[::-1])),
        *(key(source, override) for override in (
            "data.format=text", "data.format=tokens", "data.conversation_column=messages", "data.train_on_what=all",
            "data.train_on_what=last_turn", "data.too_long=drop", "trainer.max_length=20", "generator.chat_template_kwargs={a=1}",
            "generator.chat_template.allow_special_tokens=true", model(tmp_path / "v", "vocabulary"), model(tmp_path / "t", "template"),
        )),
        key(source, "generator.chat_template.source=file", f"generator.chat_template.name_or_path={tmp_path / 't.jinja'}"),
        key(source, "data.format=prompt_response", "data.response_column=answer"),
        key(source, "data.format=prompt_response"),
        key(str(Path(tmp_path / "rows.json")) if (tmp_path / "rows.json").write_text(rows) else ""),
    ]  # fmt: skip
    assert len({key(source), *others}) == len(others) + 1


def test_what_decides_nothing_leaves_the_entry_as_it_is(tmp_path: Path, source: str) -> None:
    same = [
        key(write(tmp_path / "again.jsonl", ROWS)), key(Source("rows.jsonl", folder=str(tmp_path), split="train")),
        *(key(source, override) for override in (
            "data.prompt_column=a", "data.text_column=b", "data.num_workers=2", "trainer.seed=7", "data.weights=[2.0]",
            model(tmp_path / "copy"), model(tmp_path / "w", "weights"),
        )),
    ]  # fmt: skip
    assert {*same} == {key(source)}
    text = "data.format=text"
    (tmp_path / "rest").mkdir()
    assert key(source, text) == key(source, text, "data.conversation_column=a", "data.train_on_what=all")
    assert key(source, text) == key(source, text, model(tmp_path / "rest" / "t", "template"))
    tokens = "data.format=tokens"
    assert key(source, tokens) == key(source, tokens, model(tmp_path / "rest" / "v", "vocabulary"))


def test_a_template_that_writes_the_day_is_another_one_tomorrow(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = model(tmp_path / "dated")
    (tmp_path / "dated" / "chat_template.jinja").write_text(f"{{{{ strftime_now('%d %b %Y') }}}}{TEMPLATE}")
    today = key(source, dated), key(source)

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    monkeypatch.setattr(hpcrl.data.token_cache, "datetime", Tomorrow)
    assert key(source, dated) != today[0]
    assert key(source) == today[1]


def spoil(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])


@pytest.mark.parametrize("name", [*FILES, RECORD])
@pytest.mark.parametrize("damage", [spoil, Path.unlink, lambda path: os.truncate(path, path.stat().st_size // 2)])
def test_a_damaged_entry_is_made_anew(name: str, damage, tmp_path: Path, source: str, uncached: list[bytes]) -> None:
    made(tmp_path, "first", source)
    (entry,) = entries(tmp_path)
    damage(entry / name)
    assert contents(made(tmp_path, "second", source)) == uncached
    inode = (entry / FILES[0]).stat().st_ino
    third = made(tmp_path, "third", source)
    assert contents(third) == uncached
    assert (third.path / FILES[0]).stat().st_ino == inode, "the entry is whole again"


def test_where_there_are_no_hard_links_files_are_copied(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = contents(made(tmp_path, "alone", source, cached=False))
    monkeypatch.setenv("HPCRL_FAULT", " ".join(f"link@{number}:raise=EPERM" for number in range(1, 100)))
    first, second = made(tmp_path, "first", source), made(tmp_path, "second", source)
    (entry,) = entries(tmp_path)
    assert contents(first) == contents(second) == good
    assert len({(folder / FILES[0]).stat().st_ino for folder in (first.path, second.path, entry)}) == 3
    assert sorted(path.name for path in entry.iterdir()) == sorted([*FILES, RECORD])


def test_a_run_does_without_a_cache_that_cannot_be_written(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    token_cache(tmp_path).write_text("no folder")
    assert len(made(tmp_path, "first", source)) == 40
    assert "the tokens could not be kept for other runs" in capsys.readouterr().out


def test_files_that_change_while_they_are_read_are_not_kept(tmp_path: Path, source: str) -> None:
    read = count()

    def change() -> None:
        if next(read) == 5:
            with Path(source).open("a") as file:
                file.write(json.dumps(talk("ab", LETTERS)) + "\n")

    tokenizer = Tokenizer(
        Run(tmp_path / "project" / "run"),
        1,
        Recipe.of(config()),
        progress=change,
        cache=TokenCache(token_cache(tmp_path)),
    )
    tokenizer.dataset("train-0", "run", Source(source))
    assert not entries(tmp_path)


def test_runs_that_begin_at_the_same_time_do_not_disturb_each_other(tmp_path: Path, source: str) -> None:
    good = contents(made(tmp_path, "alone", source, cached=False))
    context = multiprocessing.get_context("fork")
    began = context.Barrier(4)

    def several(number: int) -> None:
        for at in range(6):
            began.wait()
            assert contents(made(tmp_path, f"{number}-{at}", source)) == good
            began.wait()
            if number == 0:
                shutil.rmtree(token_cache(tmp_path))

    processes = [context.Process(target=several, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
