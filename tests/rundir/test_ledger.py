"""The first report of how an attempt ended is the one that stands, also on a filesystem without hard links; a record of attempts, starts and
outcomes that is not the one that was written is refused."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpcrl import faults as fault
from hpcrl.errors import RunError
from hpcrl.rundir import commit as exclusive
from hpcrl.rundir.commit import committed_directory, place, write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, outcome_of, read_attempts, read_outcomes, report_outcome
from hpcrl.rundir.starts import note, read_starts, require_starts


@pytest.fixture(params=["links", "EPERM", "EOPNOTSUPP"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(fault, "_passed", fault.Counter())
    if request.param != "links":
        monkeypatch.setenv("HPCRL_FAULT", " ".join(f"link@{n}:raise={request.param}" for n in range(1, 40)))
    return Run(tmp_path / "run")


def test_the_first_report_stands(run: Run) -> None:
    assert report_outcome(run, 1, "failed", "the cause", "trainer-0").message == "the cause"
    assert report_outcome(run, 1, "failed", "a consequence", "agent-1").message == "the cause"
    assert [outcome.message for outcome in read_outcomes(run)] == ["the cause"]


def test_of_many_reports_all_read_the_same_one(run: Run) -> None:
    start, target = threading.Barrier(8), run.outcomes / "1.json"
    read: list[str] = []

    def report(number: int) -> None:
        write_json(run.outcomes / f".{number}", number)
        start.wait()
        place(run.outcomes / f".{number}", target)
        read.append(target.read_text())

    threads = [threading.Thread(target=report, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 8
    assert len(set(read)) == 1
    assert not [name for name in os.listdir(run.outcomes) if name[1:].isdigit()]


def test_who_claims_and_dies_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    monkeypatch.setattr(fault, "_passed", fault.Counter())
    monkeypatch.setenv("HPCRL_FAULT", "link:raise=EPERM")
    monkeypatch.setattr(exclusive, "_PATIENCE_S", 0.2)
    run.outcomes.mkdir(parents=True)
    (run.outcomes / ".1.json.claim").touch()
    report_outcome(run, 1, "lost", "it ended without a word", "the next attempt")
    assert outcome_of(run, 1) is not None


RECORDS: dict[str, tuple[Callable[[Run], Path], Callable[[Run], list[Any]]]] = {
    "attempts": (lambda run: run.attempts, read_attempts),
    "starts": (lambda run: run.starts, read_starts),
    "outcome": (lambda run: run.outcome(1), read_outcomes),
}


@pytest.fixture
def recorded(tmp_path: Path) -> Run:
    """A run of two attempts; the host names have the signs that a flipped bit makes ends of lines."""
    run = Run(tmp_path / "run")
    run.path.mkdir()
    for number in (1, 2):
        open_attempt(run, f"7.{number - 1}", ["gpu-1", "MJ*:"])
        note(run, {"attempt": number, "from": None if number == 1 else "s000040"})
    report_outcome(run, 2, "failed", "MJ-*: out of memory", "rank-1", "gpu-1")
    return run


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    yield
    path.write_bytes(before)


@pytest.mark.parametrize("kind", RECORDS)
def test_a_bit_that_flips_is_found_wherever_it_is(recorded: Run, kind: str) -> None:
    find, read = RECORDS[kind]
    path = find(recorded)
    content = path.read_bytes()
    for at in range(len(content)):
        for bit in range(8) if kind == "starts" else {0, at % 8}:
            flipped = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
            with replaced(path, flipped), pytest.raises(RunError, match=rf"{path.name}.* is damaged: "):
                read(recorded)


@pytest.mark.parametrize("kind", ["attempts", "starts"])
def test_lines_that_are_cut_off_leave_those_before_them(recorded: Run, kind: str) -> None:
    find, read = RECORDS[kind]
    path, whole = find(recorded), read(recorded)
    content = path.read_bytes()
    first = content.index(b"\n")
    for length in range(len(content)):
        for zeros in (b"", bytes(9)):
            with replaced(path, content[:length] + zeros):
                found = read(recorded)
                assert found == whole[: len(found)]
                assert len(found) == (length >= first) + (length >= len(content) - 1)


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_of_an_earlier_version_is_read_and_one_that_was_changed_is_not(recorded: Run, kind: str) -> None:
    find, read = RECORDS[kind]
    path, whole = find(recorded), read(recorded)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(len(line["blake2b"]) == 32 for line in lines)
    changed = [{name: 7 if type(value) is int else value for name, value in line.items()} for line in lines]
    path.write_text("\n".join(map(json.dumps, changed)))
    with pytest.raises(
        RunError, match=r"is damaged: its checksum differs\. Restore it from a backup, or (delete that line|remove it)"
    ) as raised:
        read(recorded)
    if kind != "outcome":
        assert f"{path}, line 1, is" in str(raised.value)
    for line in lines:
        del line["blake2b"]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read(recorded) == whole


def test_an_outcome_in_the_place_of_anothers(recorded: Run) -> None:
    recorded.outcome(1).write_bytes(recorded.outcome(2).read_bytes())
    with pytest.raises(RunError, match=r"1\.json is damaged: it is the outcome of attempt 2\."):
        read_outcomes(recorded)


def test_attempts_that_lost_their_outcomes_are_lost_and_lines_go_by_their_numbers(recorded: Run) -> None:
    recorded.outcome(1).unlink()
    first, second = recorded.attempts.read_text().splitlines()
    recorded.attempts.write_text(f"{second}\n{first}\n")
    assert [attempt.number for attempt in read_attempts(recorded)] == [1, 2]
    assert open_attempt(recorded, "7.2", ["gpu-1"]).number == 3
    assert [(outcome.attempt, outcome.kind) for outcome in read_outcomes(recorded)] == [(1, "lost"), (2, "failed")]


def test_starts_that_are_gone_are_missed(recorded: Run) -> None:
    """A checkpoint that an attempt gave up would count again."""
    for step, attempt in ((40, 1), (50, 1), (45, 2)):
        with committed_directory(recorded.checkpoint(step), attempt, step=step) as directory:
            (directory / "model").touch()
    require_starts(recorded)
    first, _ = recorded.starts.read_text().splitlines()
    recorded.starts.write_text(first + "\n")
    with pytest.raises(
        RunError, match=r"starts\.jsonl does not know where attempt 2 started, which committed s000045"
    ) as raised:
        require_starts(recorded)
    line = str(raised.value).partition("echo '")[2].partition("' >> ")[0]
    assert json.loads(line) == {"attempt": 2, "from": "s000040"}
    recorded.starts.write_text(f"{first}\n{line}\n")
    require_starts(recorded)
    recorded.starts.unlink()
    with pytest.raises(RunError, match=r"attempt 1 started, which committed s000040.* went on from the beginning"):
        require_starts(recorded)
