"""What a list of runs shows of each, read from the ends of its metrics: the same as reading all of them would tell."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from hpcrl.observe.metrics import Curve, MetricsWriter, merged
from hpcrl.observe.summary import REWARD, STEP_SECONDS, headline
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.records import with_checksum
from hpcrl.rundir.starts import note


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "p" / "run")
    run.path.mkdir(parents=True)
    return run


def line(attempt: int, step: int, **metrics: float) -> str:
    return json.dumps({"attempt": attempt, "step": step, "time": float(step), "metrics": metrics}) + "\n"


def play(run: Run, chance: random.Random) -> None:
    """Write attempts that continue after random steps; writers of earlier ones that were thought dead write on, lines are cut off."""
    texts, reached = {"trainer": "", "controller": ""}, 0
    for attempt in range(1, chance.randint(2, 6)):
        open_attempt(run, f"1.{attempt}", ["a"])
        resume = chance.randint(0, reached) if attempt > 1 else 0
        begins = chance.random() < 0.8  # else it ends while it loads
        if begins:
            note(run, {"attempt": attempt, "from": f"s{resume:06d}" if resume else None})
        for process in texts if begins else ():
            texts[process] += json.dumps({"attempt": attempt, "resume": resume}) + "\n"
        for step in range(resume + 1, resume + chance.randint(1, 9)) if begins else ():
            reached = max(reached, step)
            texts["controller"] += line(attempt, step, **{REWARD: chance.random()}) + line(attempt, step, other=1.0)
            texts["trainer"] += line(attempt, step, **{STEP_SECONDS: chance.random(), "text/with a \n in it": 0.0})
            if attempt > 1 and chance.random() < 0.2:
                texts["trainer"] += line(attempt - 1, step + 5, **{STEP_SECONDS: 7.0})
        texts[chance.choice(list(texts))] += '{"attempt": 1, "step": 1, "metrics": {"timing/st\n' * chance.randint(0, 1)
    run.metrics.mkdir()
    for process, text in texts.items():
        run.metrics_of(process).write_text(text + chance.choice(["", '{"attempt": 9']))


@pytest.mark.parametrize("seed", range(12))
def test_the_ends_of_the_metrics_tell_what_all_of_them_do(run: Run, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.observe.metrics._BLOCK", random.Random(seed).choice([7, 64, 1000, 1 << 16]))
    play(run, random.Random(seed))
    steps, found = merged(run), headline(run)
    rewards = {step: metrics[REWARD] for step, metrics in steps.items() if REWARD in metrics}
    expected = [(step, rewards[step]) for step in (min(rewards), max(rewards))] if rewards else [None, None]
    assert [found.reward_first, found.reward_last] == expected
    assert found.steps == max((step for step, metrics in steps.items() if STEP_SECONDS in metrics), default=0)


def test_long_metrics_are_not_read_whole(run: Run) -> None:
    open_attempt(run, "1.0", ["a"])
    many = {f"policy/loss_metrics/{number}": 0.1 for number in range(60)}
    run.metrics.mkdir()
    for process, name in (("trainer", STEP_SECONDS), ("controller", REWARD)):
        lines = [line(1, step, **{name: 2.0}, **many) for step in range(1, 3001)]
        run.metrics_of(process).write_text("".join(lines))
        assert run.metrics_of(process).stat().st_size > 5_000_000
    before = _bytes_read()
    assert (headline(run).steps, headline(run).reward_last) == (3000, (3000, 2.0))
    assert _bytes_read() - before < 600_000


def test_a_damaged_file_that_is_one_long_line_takes_no_time(run: Run) -> None:
    open_attempt(run, "1.0", ["a"])
    run.metrics.mkdir()
    run.metrics_of("trainer").write_text(line(1, 1, **{STEP_SECONDS: 2.0}))
    os.truncate(run.metrics_of("trainer"), 100_000_000)
    began = time.process_time()
    assert headline(run).steps == 1
    assert time.process_time() - began < 2


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_time_of_a_lost_attempt_ends_with_its_last_word(run: Run) -> None:
    """The next attempt writes down that it was lost, perhaps days later."""
    first = open_attempt(run, "1.0", ["a"])
    run.logs(1).mkdir(parents=True)
    run.log(1, "trainer-0").write_text("step 1\n")
    os.utime(run.log(1, "trainer-0"), (first.started + 100, first.started + 100))
    report_outcome(run, 1, "lost", "it ended without a word", "the next attempt")
    path = run.outcome(1)
    outcome = json.loads(path.read_text())
    del outcome["blake2b"]
    path.write_text(with_checksum(outcome | {"ended": first.started + 90_000})[0])
    assert headline(run).seconds == pytest.approx(100, abs=1)
    run.log(1, "trainer-0").unlink()
    assert headline(run).seconds == 0.0


def test_a_curve_goes_on_where_it_was_and_begins_anew_after_a_resume(run: Run) -> None:
    curve = Curve(run, "x")
    assert curve.values() == {}
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"x": step, "y": 0.0})
            assert curve.values()[step] == step
    with run.metrics_of("trainer").open("a") as file:
        file.write(line(1, 3, x=3.0) * 20_000)
    assert len(curve.values()) == 3
    before = _bytes_read()
    assert len(curve.values()) == 3
    assert _bytes_read() - before < 1000
    with MetricsWriter(run, "trainer", 2, 1) as writer:
        writer.write(2, {"x": 20.0})
    assert curve.values() == {1: 1.0, 2: 20.0}
