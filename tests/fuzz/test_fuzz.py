"""A share of the fuzzing in `make test`, a million messages and a million configurations in `make fuzz`, and what was found before.

A failing input is written to .fuzz/ as it is, messages without those that it does not take; moved to tests/fuzz/corpus it is tried in every
`make test`. HPCRL_FUZZ_SEED repeats a run of `make fuzz`, HPCRL_FUZZ says how many inputs there are.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz import configurations
from tests.fuzz.messages import MESSAGES, Failure, Scene, play, read_failure, replay
from tests.paths import ROOT

CORPUS = Path(__file__).parent / "corpus"
FOUND = ROOT / ".fuzz"
MANY = int(os.environ.get("HPCRL_FUZZ", "1000000"))
FEW = 10_000, 1_500
"""Messages and configurations in `make test`: some seven seconds of one processor."""


def seed() -> str:
    """Return the seed of a long run; the short ones have the same inputs each time."""
    value = os.environ.get("HPCRL_FUZZ_SEED") or secrets.token_hex(4)
    print(f"HPCRL_FUZZ_SEED={value}", flush=True)
    return value


def report(kind: str, text: str) -> None:
    path = FOUND / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    pytest.fail(f"{json.loads(text)['why']}\n{path} has the input; move it to {CORPUS / kind} to keep it")


def say_many(count: int, seed: str) -> None:
    answers = Counter[int]()
    for number in range(-(-count // MESSAGES)):
        found = play(f"{seed}-{number}")
        if isinstance(found, Failure):
            report("messages", found.text())
        else:
            answers.update(found)
    print(f"messages by the status of their answer: {dict(answers)}", flush=True)
    assert answers.keys() == {200, 400, 401, 404, 409}
    assert answers[200] > 0.2 * answers.total(), "hardly anything of what was said was right"


def load_many(count: int, seed: str) -> None:
    ends = Counter[str]()
    for number in range(count):
        content, overrides = configurations.spoilt(f"{seed}-{number}")
        try:
            ends[configurations.load(content, overrides)] += 1
        except (KeyboardInterrupt, pytest.fail.Exception):  # it was interrupted, as by a limit of time
            raise
        except BaseException:  # noqa: BLE001  whatever it is, the input is kept
            report("configurations", configurations.written(content, overrides, f"seed {seed}-{number}"))
    print(f"configurations: {dict(ends)}", flush=True)
    assert min(ends["loaded"], ends["refused"]) > 0.02 * count


def test_some_messages() -> None:
    say_many(FEW[0], "a few")


def test_some_configurations() -> None:
    load_many(FEW[1], "a few")


@pytest.mark.fuzz
def test_many_messages() -> None:
    say_many(MANY, seed())


@pytest.mark.fuzz
def test_many_configurations() -> None:
    load_many(MANY, seed())


@pytest.mark.parametrize("path", sorted((CORPUS / "messages").glob("*.json")), ids=lambda path: path.stem)
def test_messages_of_the_corpus(path: Path) -> None:
    failure = read_failure(path.read_text())
    assert replay(failure.scene, failure.messages) is None


@pytest.mark.parametrize("path", sorted((CORPUS / "configurations").glob("*.json")), ids=lambda path: path.stem)
def test_configurations_of_the_corpus(path: Path) -> None:
    configurations.load(*configurations.read_written(path.read_text()))


def test_an_honest_run_comes_to_its_end() -> None:
    """So what is found elsewhere is the messages' doing."""
    for staleness in range(3):
        for sampling in (None, "filter", "replace"):
            assert replay(Scene(staleness=staleness, surplus=1, baselines=True, sampling=sampling), []) is None


def test_what_was_found_can_be_read_again() -> None:
    failure = Failure(Scene(), [("/leave", b'{"worker": "\xff\\ud800"}')], "why")
    assert read_failure(failure.text()) == failure
