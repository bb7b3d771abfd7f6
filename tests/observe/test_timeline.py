"""Timelines: spans without gaps whatever happens, shares of a step that add up, and the file for Perfetto."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.observe import timeline as timeline_module
from hpcrl.observe.timeline import (
    IDLE,
    KINDS,
    LOAD,
    Span,
    Timeline,
    process_lines,
    process_start,
    read_spans,
    shares,
    steps_of,
)
from hpcrl.rundir.layout import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "project" / "run")
    run.path.mkdir(parents=True)
    run.config.write_text("")
    return run


def gaps(spans: list[Span]) -> list[float]:
    return [after.start - before.end for before, after in pairwise(spans)]


def test_the_imports_of_a_process_come_first(tmp_path: Path) -> None:
    run, before = Run(tmp_path), time.time()
    assert before - 7200 < process_start() < before
    with closing(Timeline(run, "rank-0", 1, began=before - 2)) as timeline:
        timeline.enter(IDLE)
    first, second, *_ = read_spans(run)
    assert (first.phase, second.phase) == ("import", LOAD)
    assert 2 <= first.end - first.start < 600
    assert first.end == pytest.approx(second.start, abs=1e-3)


def test_shares_of_a_step_add_up_for_every_role(run: Run) -> None:
    trainer, engine = Timeline(run, "rank-0", 1), Timeline(run, "rollout-0", 1)
    for step in (1, 2, 3):
        trainer.begin_step(step)
        with trainer.during("wait_for_generation_buffer"):
            engine.enter("generate")
            time.sleep(0.02)
            engine.enter(IDLE)
        with trainer.during("policy_train"):
            time.sleep(0.01)
            with trainer.during("save_checkpoints"):
                time.sleep(0.01)
    engine.close()
    trainer.close()
    spans = read_spans(run)
    steps = steps_of(spans)
    assert list(steps) == [1, 2, 3]
    for start, end in steps.values():
        found = shares(spans, start, end)
        assert set(found) == {"rank-0", "rollout-0"}
        assert [sum(parts.values()) for parts in found.values()] == pytest.approx([1, 1])
        slept = {"wait_for_generation_buffer": 0.02, "policy_train": 0.01, "save_checkpoints": 0.01}
        assert all(found["rank-0"][phase] * (end - start) > 0.99 * least for phase, least in slept.items())
    before = shares(spans, steps[1][0] - 1.0, steps[1][0] - 0.5)
    assert before == {}, "no process had begun"
    whole = shares(spans, steps[1][0] - 1.0, steps[3][1])["rank-0"]
    assert sum(whole.values()) == pytest.approx(1)
    assert whole["absent"] > 0.8


def test_many_short_phases_are_added_up_exactly(run: Run) -> None:
    many, changes = Timeline(run, "controller", 1, resolution_s=0.05), 0
    began, drawn, spent = time.monotonic(), random.Random(0), dict.fromkeys(("a", "b", "c"), 0.0)
    many.enter("a")
    phase, since = "a", time.monotonic()
    while time.monotonic() - began < 0.3:
        time.sleep(drawn.random() / 2000)
        now = time.monotonic()
        spent[phase] += now - since
        phase, since = drawn.choice(list(spent)), now
        many.enter(phase)
        changes += 1
    many.close()
    spans = read_spans(run)
    assert changes > 100
    assert len(spans) <= 3 * 7 + 1, "at most one span of each phase in 0.05 s"
    assert max(map(abs, gaps(spans))) < 1e-4
    for name, seconds in spent.items():
        assert sum(span.end - span.start for span in spans if span.phase == name) == pytest.approx(seconds, abs=0.02)


def test_threads_share_a_timeline(run: Run) -> None:
    timeline = Timeline(run, "reward-0", 1)

    def work() -> None:
        for _ in range(200):
            with timeline.during("score"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    assert max(map(abs, gaps(read_spans(run))), default=0.0) < 1e-4


def test_a_process_that_was_killed_in_a_line_loses_only_that(run: Run) -> None:
    first = Timeline(run, "rollout-0", 1)
    first.enter(IDLE)
    first.close()
    whole = len(read_spans(run))
    with run.timeline_of(1, "rollout-0").open("a") as file:
        file.write('{"start": 17')
    second = Timeline(run, "rollout-0", 1)
    second.enter(IDLE)
    second.close()
    assert len(read_spans(run)) == 2 * whole
    run.timeline_of(2, "rollout-0").parent.mkdir()
    run.timeline_of(2, "rollout-0").write_text('[1]\n{"start": "x", "seconds": 1, "phase": "load"}\n7\n')
    assert read_spans(run, 2) == []
    assert len(read_spans(run, 1)) == len(read_spans(run)) == 2 * whole


def test_files_are_bounded_with_exact_sums_and_the_newest_spans(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "_LARGEST", 10_000)
    monkeypatch.setattr(timeline_module, "_WRITE_S", 0.0)
    began, finished, timeline = time.time(), 0.0, Timeline(run, "rank-0", 1, resolution_s=0.0)
    for step in range(1, 501):
        timeline.begin_step(step)
        timeline.enter("policy_train" if step % 2 else "sync_weights")
        if step == 400:
            timeline.finish_group()
            finished = time.time()
    timeline.close()
    ended = time.time()
    sizes = [path.stat().st_size for path in run.timeline(1).iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 10_300
    spans = read_spans(run)
    assert sum(span.end - span.start for span in spans) == pytest.approx(spans[-1].end - spans[0].start, abs=1e-3)
    assert spans[0].start == pytest.approx(began, abs=0.5)
    assert spans[-1].end == pytest.approx(ended, abs=0.5)
    steps = list(steps_of(spans))
    assert steps[-20:] == list(range(481, 501))
    lines = list(process_lines(run, 1, "rank-0"))
    assert [line["process"] for line in lines if "process" in line] == ["rank-0"]
    assert [line["finished"] for line in lines if "finished" in line] == [pytest.approx(finished, abs=0.5)]


def test_gaps_and_foreign_lines_outlive_what_is_made_coarser(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.timeline_of(1, "rollout-0")
    path.parent.mkdir(parents=True)
    at, lines = 0.0, ["[7]", '{"start": "x", "seconds": 1, "phase": "load"}']
    for number in range(1000):
        at += 50.0 * (number == 500)  # it was started again
        lines.append(json.dumps({"start": at, "seconds": 1.0, "phase": ("generate", "idle")[number % 2]}))
        at += 1.0
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(timeline_module, "_LARGEST", 20_000)
    timeline_module.shorten(path)
    assert not path.exists()
    spans = read_spans(run)
    assert len(spans) < 200
    seconds = {
        phase: sum(span.end - span.start for span in spans if span.phase == phase) for phase in ("generate", "idle")
    }
    assert seconds == {"generate": 500, "idle": 500}
    assert [later.start - span.end for span, later in pairwise(spans) if later.start - span.end > 1e-3] == [50]


def test_what_cannot_be_written_does_not_end_the_process(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.timelines.write_text("")  # where a directory has to be
    timeline = Timeline(run, "rank-0", 1)
    timeline.close()
    timeline.enter(IDLE)
    timeline.close()
    assert capsys.readouterr().out.count("the timeline ends here") == 1


def test_a_step_that_was_trained_again_lies_where_the_last_attempt_trained_it() -> None:
    spans = [
        Span("rank-0", 1, "policy_train", 10, 20, 1),
        Span("rank-0", 1, "policy_train", 20, 30, 2),
        Span("rank-0", 2, LOAD, 100, 110),
        Span("rank-0", 2, "wait_for_generation_buffer", 110, 115, 2),
        Span("rank-0", 2, "policy_train", 115, 120, 2),
        Span("rank-1", 2, "policy_train", 90, 130, 2),
    ]
    assert steps_of(spans) == {1: (10, 20), 2: (110, 120)}
    assert shares(spans, 15, 105)["rank-0"] == {"policy_train": 15 / 90, LOAD: 5 / 90, "absent": 70 / 90}


def test_every_phase_is_of_one_kind() -> None:
    phases = [phase for of_kind in KINDS.values() for phase in of_kind]
    assert len(phases) == len(set(phases))
    assert Span("rank-0", 1, "of a later hpcrl", 0, 1).kind == "other"


def test_trace_of_some_steps(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.timeline(1)
    folder.mkdir(parents=True)
    lines = [{"start": 100.0 + step, "seconds": 1.0, "phase": "policy_train", "step": step} for step in range(1, 6)]
    (folder / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "rollout-0.jsonl").write_text('{"start": 90.0, "seconds": 13.5, "phase": "generate"}\n')
    path = tmp_path / "trace.json"
    assert main(["trace", str(run.path), "--steps", "2:3", "-o", str(path)]) == 0
    said = capsys.readouterr().out
    assert "rank-0       policy_train 100.0%" in said
    assert "rollout-0    generate 75.0%  absent 25.0%" in said
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    assert set(named) == {"steps", "rank-0", "rollout-0"}
    trained = [event for event in events if event["ph"] == "X" and event["pid"] == named["rank-0"]]
    assert [(event["name"], event["dur"], event["args"]["step"]) for event in trained] == [
        ("policy_train", 1e6, 2),
        ("policy_train", 1e6, 3),
    ]
    assert trained[1]["ts"] - trained[0]["ts"] == 1e6
    assert [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 0].count("step 2") == 1
    assert main(["trace", str(run.path), "--steps", "7:"]) == 5
    assert "there are steps 1 to 5" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["trace", str(run.path), "--steps", "3:2"])
