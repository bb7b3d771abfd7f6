"""The account of node seconds: it adds up to the allocation whatever the timelines say, and each second counts as what it was."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random

import pytest

from hpcrl.cli.main import main
from hpcrl.observe import timeline
from hpcrl.observe.first_step import first_steps
from hpcrl.observe.goodput import Account, GoodputMeter, account_of, account_since
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.node_seconds import CATEGORIES, UNFINISHED, Held, Seconds, node_seconds
from hpcrl.observe.timeline import KINDS, Span
from hpcrl.rundir.allocations import (
    LEFT_OVER,
    AllocatedNode,
    Allocation,
    end_allocation,
    new_allocation,
    read_allocations,
)
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.records import append_text
from hpcrl.rundir.starts import note
from tests.paths import ROOT

BATCH = "wait_for_generation_buffer"
PHASES = [*(phase for phases in KINDS.values() for phase in phases), UNFINISHED, "a phase of another hpcrl"]
AFTER = ("lost", "until its end")
TRAINER, REPLICA = [["rank-0"]], [["rollout-0"]]
Phases = list[tuple[str, float]]


def spans_of(process: str, phases: Phases, start: float = 0.0, attempt: int = 1, step: int | None = None) -> list[Span]:
    found = list[Span]()
    for phase, seconds in phases:
        found.append(Span(process, attempt, phase, start, start + seconds, step))
        start += seconds
    return found


def random_spans(random: Random, process: str) -> list[Span]:
    """Return spans with gaps, overlaps, several attempts and clocks that differ."""
    found, at = list[Span](), random.uniform(-20, 50)
    for _ in range(random.randrange(40)):
        seconds = random.choice([0.0, 1e-6, random.uniform(0, 9)])
        attempt = 1 + int(at > 60)
        found.append(Span(process, attempt, random.choice(PHASES), at, at + seconds, random.choice([None, 1, 2, 3])))
        at += seconds + random.choice([0.0, 0.0, 3.0, -1.0])
    return sorted(found, key=lambda span: span.start)


@pytest.mark.parametrize("seed", range(40))
def test_any_timelines_add_up_to_the_allocation(seed: int) -> None:
    random = Random(seed)
    processes = ["rank-0", "rank-4", "rollout-0", "rollout-1", "rollout-2", "scorer-0", "reward-0"]
    spans = {process: random_spans(random, process) for process in processes if random.random() < 0.9}
    layouts = [
        TRAINER,
        [["rank-0", "rollout-0"], ["rank-0", "rollout-1"]],
        [["rollout-0"], ["rollout-1"], ["rollout-2"]],
    ]
    layouts += [[["rank-4"]], [["scorer-0"]], [["reward-0"]], [], [["rollout-7"]]]
    held = list[Held]()
    for number in range(random.randrange(1, 9)):
        start = random.uniform(0, 100)
        held.append(Held(number % 3, "some", start, start + random.uniform(0, 60), random.choice(layouts), AFTER))
    found = node_seconds(held, spans, {1: 2}, {1: 0.75})
    for attempt in {node.attempt for node in held}:
        wanted = sum(node.end - node.start for node in held if node.attempt == attempt)
        assert sum(found[attempt, "some"].values()) == pytest.approx(wanted, abs=1e-6)
    uses = [use for row in found.values() for use in row.items()]
    assert all(seconds >= 0 for _, seconds in uses)
    assert {use[0] for use, _ in uses} <= set(CATEGORIES)


def rounded(seconds: Seconds) -> dict[tuple[str, str], float]:
    return {use: round(value, 6) for use, value in seconds.items()}


def test_each_second_of_two_nodes_counts_as_what_it_was() -> None:
    trainer: Phases = [("import", 2), ("load", 3), ("eval", 2), (BATCH, 10), ("policy_train", 4), ("sync_weights", 1), ("other", 1), ("save_checkpoints", 3), ("fwd_logprobs_values_reward", 2)]  # fmt: skip
    replica: Phases = [("import", 1), ("load", 7), ("generate", 6), ("environment", 2), ("idle", 6), ("fetch_weights", 1), ("update_weights", 1), ("evaluate", 3)]  # fmt: skip
    spans = {"rank-0": spans_of("rank-0", trainer, 2, step=1), "rollout-0": spans_of("rollout-0", replica, 2)}
    held = [
        Held(1, "trainer", 0, 40, TRAINER, ("idle", "its end")),
        Held(1, "rollout", 0, 40, REPLICA, ("idle", "its end")),
    ]
    found = node_seconds(held, spans, {1: 1}, {})
    assert rounded(found[1, "trainer"]) == {
        ("starting", "jobs and agents"): 2, ("starting", "imports"): 2, ("starting", "models"): 3, ("evaluation", ""): 2, ("waiting", "a start"): 1, ("waiting", "samples"): 7, ("waiting", "environments"): 2,
        ("waiting", "weights"): 1, ("training", ""): 6, ("idle", "between phases"): 1, ("saving", "checkpoints"): 3, ("idle", "its end"): 10,
    }  # fmt: skip
    assert rounded(found[1, "rollout"]) == {
        ("starting", "jobs and agents"): 2, ("starting", "imports"): 1, ("starting", "models"): 7, ("generation", ""): 6, ("waiting", "environments"): 2, ("waiting", "the slowest samples"): 1,
        ("waiting", "training"): 4, ("waiting", "weights"): 2, ("waiting", "weights to load"): 1, ("evaluation", ""): 3, ("idle", "its end"): 11,
    }  # fmt: skip


def test_a_node_with_turns_counts_the_replica_while_the_rank_waits_for_its_batch() -> None:
    rank: Phases = [("load", 4), ("offload", 1), (BATCH, 8), ("onload", 1), ("policy_train", 6)]
    replica: Phases = [("load", 3), ("asleep", 3), ("generate", 5), ("idle", 1), ("asleep", 8)]
    spans = {"rank-0": spans_of("rank-0", rank, step=1), "rollout-0": spans_of("rollout-0", replica)}
    found = node_seconds([Held(1, "trainer", 0, 20, [["rank-0", "rollout-0"]], AFTER)], spans, {}, {})
    assert rounded(found[1, "trainer"]) == {
        ("starting", "models"): 4, ("waiting", "changes of turns"): 4, ("generation", ""): 5, ("waiting", "the slowest samples"): 1, ("training", ""): 6,
    }  # fmt: skip


def test_a_rank_that_lends_waits_for_samples_while_the_replica_sleeps() -> None:
    rank: Phases = [(BATCH, 8), ("policy_train", 2)]
    replica: Phases = [("asleep", 3), ("load", 1), ("generate", 3), ("asleep", 3)]
    spans = {"rank-0": spans_of("rank-0", rank, step=1), "rollout-1": spans_of("rollout-1", replica)}
    spans["rollout-0"] = spans_of("rollout-0", [("generate", 10)])
    found = node_seconds([Held(1, "trainer", 0, 10, [["rank-0", "rollout-1"]], AFTER, lends=True)], spans, {}, {})
    assert rounded(found[1, "trainer"]) == {("waiting", "samples"): 5, ("generation", ""): 3, ("training", ""): 2}


def test_a_node_that_the_layout_has_no_use_for_is_idle() -> None:
    found = node_seconds([Held(1, LEFT_OVER, 0, 9, [], AFTER)], {}, {}, {})
    assert rounded(found[1, LEFT_OVER]) == {("idle", LEFT_OVER): 9}


def test_devices_of_a_node_share_it_equally() -> None:
    spans = {f"rollout-{at}": spans_of(f"rollout-{at}", [("generate", 8 - 2 * at)]) for at in range(4)}
    node = Held(1, "rollout", 0, 8, [[f"rollout-{at}"] for at in range(4)], ("idle", "its end"))
    assert rounded(node_seconds([node], spans, {}, {})[1, "rollout"]) == {("generation", ""): 5, ("idle", "its end"): 3}


def test_a_restarted_replica_starts_and_groups_that_are_not_trained_are_lost() -> None:
    again = [*spans_of("rollout-0", [("generate", 4)]), *spans_of("rollout-0", [("generate", 4)], 6)]
    found = node_seconds([Held(1, "rollout", 0, 10, REPLICA, AFTER)], {"rollout-0": again}, {}, {1: 0.75})
    assert rounded(found[1, "rollout"]) == {
        ("generation", ""): 6,
        ("lost", "not trained"): 2,
        ("starting", "models"): 2,
    }


def made(path: Path, attempts: int = 1) -> Run:
    """Return a run with a trainer node and a rollout node, whose first attempt was killed after step 4 and was continued from step 2."""
    run = Run(path)
    write_text(run.config, "")
    write_json(run.submission, {"executor": "slurm", "job_id": "7_0", "submitted": 940.0})
    for number in range(1, attempts + 1):
        start = 1000.0 * number
        open_attempt(run, f"7_0.{number - 1}", ["n1", "n2"])
        note(run, {"attempt": number, "from": "s000002" if number > 1 else None})
        record(run, f"7_0.{number - 1}", start, start + 65)
        for step in range(1 if number == 1 else 3, 5):
            at = start + 10 * step
            write(run, number, spans_of("rank-0", [(BATCH, 6), ("policy_train", 4)], at, number, step))
            write(run, number, spans_of("rollout-0", [("generate", 6), ("idle", 4)], at, number))
    return run


def record(run: Run, job: str, start: float, until: float, *, over: bool = True) -> None:
    nodes = [
        {"host": "n1", "role": "trainer", "devices": TRAINER},
        {"host": "n2", "role": "rollout", "devices": REPLICA},
    ]
    own = Allocation(job, start, until, over, max(start - 60, 0), False, nodes)
    write_json(run.allocation(job), vars(own))


def write(run: Run, attempt: int, spans: list[Span]) -> None:
    lines = [
        {"start": one.start, "seconds": one.end - one.start, "phase": one.phase, "step": one.step} for one in spans
    ]
    append_text(run.timeline_of(attempt, spans[0].process), "".join(json.dumps(line) + "\n" for line in lines))


def test_steps_that_a_later_attempt_trained_again_are_lost(tmp_path: Path) -> None:
    run = made(tmp_path / "p" / "r", attempts=2)
    report_outcome(run, 2, "done", "finished", "agent-0")
    found = account_of(run)
    assert found
    assert found.total == pytest.approx(4 * 65)
    assert found.queued == 120
    rows = {(row.attempt, row.role): rounded(row.seconds) for row in found.rows}
    assert rows[1, "trainer"][("lost", "trained again")] == 8  # steps 3 and 4
    assert rows[1, "trainer"][("training", "")] == 8
    assert rows[1, "trainer"][("lost", "until its end")] == 15
    assert ("lost", "trained again") not in rows[2, "trainer"]
    assert rows[2, "trainer"][("idle", "its end")] == 15
    assert rows[1, "rollout"][("lost", "generated again")] == 24  # no group of it was finished
    assert rows[2, "rollout"][("generation", "")] == 12


def test_what_a_killed_replica_had_finished_is_no_loss(tmp_path: Path) -> None:
    run = made(tmp_path / "p" / "r")
    append_text(run.timeline_of(1, "rollout-0"), '{"finished": 1032.0}\n')
    report_outcome(run, 1, "lost", "killed", "agent-0")
    found = account_of(run)
    assert found
    (row,) = [row for row in found.rows if row.role == "rollout"]
    assert rounded(row.seconds)[("lost", "generated again")] == 4 + 6
    assert rounded(row.seconds)[("generation", "")] == 6 + 6 + 2


def test_a_living_run_keeps_what_it_has_not_committed_yet(tmp_path: Path) -> None:
    run = made(tmp_path / "p" / "r")
    record(run, "7_0.0", 1000.0, 1065.0, over=False)
    living, killed = account_of(run, now=1070.0), account_of(run, now=2000.0)
    assert living
    assert killed
    assert living.total == killed.total == pytest.approx(130)
    assert living.share("training") == pytest.approx(16 / 130)
    assert (living.share("lost"), living.share("not recorded yet")) == pytest.approx((0, 30 / 130))
    assert (killed.share("training"), killed.share("not recorded yet")) == (0, 0)


def test_windows_of_a_living_attempt_add_up(tmp_path: Path) -> None:
    run = made(tmp_path / "p" / "r")
    record(run, "7_0.0", 1000.0, 1065.0, over=False)
    windows = [account_since(run, 1, since, since + 10) for since in (1010.0, 1020.0, 1030.0)]
    for found in windows:
        assert found
        assert found.total == pytest.approx(20)
        assert found.goodput == pytest.approx(0.5)


def test_the_time_to_a_first_step_is_divided_by_what_the_trainer_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path / "p" / "r")
    write_text(run.config, "")
    append_text(run.attempts, '{"number": 1, "job": "7_0.0", "hosts": ["n1", "n2"], "started": 1002.0}\n')
    record(run, "7_0.0", 1000.0, 1065.0)
    assert first_steps(run) == []
    write(run, 1, spans_of("rank-0", [("import", 2), ("load", 3)], 1003))
    write(run, 1, spans_of("rollout-0", [("import", 2), ("load", 5), ("generate", 4)], 1003))
    for step in (1, 2):
        write(run, 1, spans_of("rank-0", [(BATCH, 6), ("policy_train", 3)], 999 + 9 * step, 1, step))
    (found,) = first_steps(run)
    assert (found.run, found.attempt, found.step) == ("p/r", 1, 1)
    assert str(found) == (
        "attempt 1, 17.0 s until step 1 is trained: job and agent 2.0 s, checks 1.0 s, imports 2.0 s, models 3.0 s, "
        "waiting for samples 4.0 s, training 3.0 s, waiting for a start 2.0 s"
    )


def test_the_first_step_of_a_long_attempt_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timeline is shortened again and again, and its start and first step are kept line by line."""
    monkeypatch.setattr(timeline, "_LARGEST", 20_000)
    run = Run(tmp_path / "p" / "r")
    phases = [(BATCH, 6.0), ("policy_train", 3.0)]
    write_text(run.config, "")
    append_text(run.attempts, '{"number": 1, "job": "7_0.0", "hosts": ["n1"], "started": 1002.0}\n')
    record(run, "7_0.0", 1000.0, 99_000.0)
    write(run, 1, spans_of("rank-0", [("import", 2), ("load", 3)], 1003))
    for first in range(1, 2001, 200):
        steps = range(first, first + 200)
        write(run, 1, [one for step in steps for one in spans_of("rank-0", phases, 999 + 9 * step, 1, step)])
        timeline.shorten(run.timeline_of(1, "rank-0"))
    (found,) = first_steps(run)
    assert str(found).startswith("attempt 1, 17.0 s until step 1 is trained"), found
    assert found.parts["training"] == pytest.approx(3)


def test_share_of_groups_that_sampling_dropped_is_lost(tmp_path: Path) -> None:
    run = made(tmp_path / "p" / "r")
    report_outcome(run, 1, "done", "finished", "agent-0")
    with MetricsWriter(run, "controller", 1, 0) as writer:
        writer.write(1, {"generate/sample_batches": 1.5})
        writer.write(2, {"generate/sample_batches": 2.5})
    for number in (HUGE, "NaN", "1e999"):
        line = f'{{"attempt": 1, "step": 3, "time": 1.0, "metrics": {{"generate/sample_batches": {number}}}}}\n'
        append_text(run.metrics_of("controller"), line)
    found = account_of(run)
    assert found
    assert found.share("generation") == found.share("lost") == pytest.approx(12 / 130)


def test_command_adds_runs_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        report_outcome(made(tmp_path / "p" / name), 1, "done", "finished", "agent-0")
    write_text(Run(tmp_path / "p" / "new").config, "")
    root = ["--root", str(tmp_path)]
    assert main(["goodput", "one", *root]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("goodput 30.8%: 2.2 node minutes, and 1:00 in the queue\n  training ")
    assert (
        "attempt 1, trainer, 1 node: goodput 25% of 1.1 node minutes: training 25%, starting 15%, waiting 37%"
        in printed
    )
    run = Run(tmp_path / "p" / "one")
    open_attempt(run, "7_0.1", ["n1"], {"a.policy_num_nodes": 1}, (), "the trainer waited")
    assert main(["goodput", "one", *root]) == 0
    assert "\nattempt 2 took 1 node(s): policy_num_nodes 1; the trainer waited\n" in capsys.readouterr().out
    assert main(["goodput", "one", "two", *root]) == 0
    assert capsys.readouterr().out.startswith("goodput 30.8% of 2 runs: 4.3 node minutes, and 2:00 in the queue\n")
    assert main(["goodput", "--project", "p", "--json", *root]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["node_seconds"]) == (["p/one", "p/two"], 260)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert main(["goodput", "new", *root]) == 5
    assert "has a record of its nodes" in capsys.readouterr().err
    assert main(["goodput", *root]) == 2


def test_queue_time_is_counted_from_submission_and_from_the_end_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "p" / "r")
    write_json(run.submission, {"submitted": 100.0})
    monkeypatch.setenv("HPCRL_JOB_STARTED", "160")
    first = new_allocation(run, "7_0.0", [AllocatedNode("n1", "trainer", TRAINER)])
    assert (first.queued, first.start) == (100, 160)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    end_allocation(run, "7_0.0")  # its agents did not begin
    (ended,) = read_allocations(run)
    assert (len(ended.nodes), ended.over) == (3, True)
    monkeypatch.delenv("HPCRL_JOB_STARTED")
    again = new_allocation(run, "7_0.1", [])
    assert (again.queued, again.start >= ended.until) == (ended.until, True)
    assert new_allocation(run, "8_0.0", []).queued == 100  # another job waited from its own submission


HUGE = "9" * 400


@pytest.mark.parametrize("number", [HUGE, "NaN", "1e999", "-1e999", "1e300", "-1", "true"])
def test_foreign_times_of_a_timeline_change_nothing(tmp_path: Path, number: str) -> None:
    run = made(tmp_path / "p" / "r")
    report_outcome(run, 1, "lost", "killed", "agent-0")
    before = account_of(run)
    for process in ("rank-0", "rollout-0"):
        for own in (f'"start": {number}, "seconds": 1', f'"start": 1030.0, "seconds": {number}'):
            append_text(run.timeline_of(1, process), f'{{{own}, "phase": "generate"}}\n')
        append_text(run.timeline_of(1, process), f'{{"finished": {number}}}\n')
    assert account_of(run) == before


def test_time_in_which_another_request_runs_is_not_in_the_queue(tmp_path: Path) -> None:
    run = Run(tmp_path / "p" / "r")
    write_text(run.config, "")
    starts = {
        "7_0.0": (100.0, 160.0, 500.0),
        "8_0.0": (100.0, 600.0, 700.0),  # another request of the same submission
        "7_0.1": (500.0, 750.0, 800.0),  # waits at the same time as 8_0.0
        "9_0.0": (0.0, 2000.0, 2010.0),  # since when it waited is not known
    }
    for job, (queued, start, until) in starts.items():
        write_json(run.allocation(job), vars(Allocation(job, start, until, True, queued)))
    write_json(run.allocation("pool"), vars(Allocation("pool", 120.0, 790.0, True, 110.0, pool=True)))
    found = account_of(run)
    assert found
    assert found.queued == 60 + 100 + 50


def test_a_damaged_run_of_a_sweep_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("s-0", "s-1", "s-2"):
        run = made(tmp_path / "p" / name)
        report_outcome(run, 1, "done", "finished", "agent-0")
        run.slurm.symlink_to("../.slurm/s")
    damaged = Run(tmp_path / "p" / "s-1").allocation("7_0.0")
    write_text(damaged, "[1]")
    root = ["--root", str(tmp_path)]
    for named in (["s"], ["--project", "p"]):
        assert main(["goodput", *named, *root]) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith("goodput 30.8% of 2 runs: ")
        assert printed.err.startswith(f"hpcrl: s-1 is left out: {damaged} is damaged: ")
    assert main(["goodput", "s-1", *root]) == 5
    assert f"{damaged} is damaged: " in capsys.readouterr().err


FOREIGN = {
    "start": [HUGE, "NaN", "1e999", "-1"],
    "until": [HUGE, "NaN", "1e300"],
    "queued": [HUGE, "NaN"],
    "nodes": [
        '[{"host": "n1", "role": "trainer", "devices": [["' + name + '"]]}]'
        for name in (
            "rank\\u0000-0",
            "../x",
            "../../logs/1/rank-0",
            "/rank-0",
            "rank-0\\n",
            "\\ud800-1",
            "",
            "rank-" + HUGE,
        )
    ]
    + ['[{"host": 7, "role": "trainer", "devices": []}]', '[{"host": "n1", "role": ["trainer"], "devices": []}]'],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_allocation_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "p" / "r")
    path = run.allocation("7_0.0")
    whole = json.loads(path.read_text())
    for value in FOREIGN[name]:
        path.write_text(json.dumps(whole | {name: "VALUE"}).replace('"VALUE"', value))
        assert main(["goodput", "r", "--root", str(tmp_path)]) == 5, value
        assert f"{path} is damaged: " in capsys.readouterr().err


def test_a_foreign_time_of_submission_does_not_end_an_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path / "p" / "r")
    for number in (HUGE, "NaN", "true"):
        write_text(run.submission, f'{{"submitted": {number}}}')
        assert new_allocation(run, "7_0.0", []).queued == 0


def test_accounts_add_up() -> None:
    assert (Account([]) + Account([], 3.0)).queued == 3.0
    assert (Account([]).total, Account([]).goodput) == (0, 0)


def test_a_commit_gets_the_shares_since_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "p" / "r")
    record(run, "7_0.0", 1000.0, 1065.0, over=False)
    clock = iter([1010.0, 1015.0, 1033.0, 1053.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    meter = GoodputMeter(run, 1)
    assert meter.shares() == {}, "too soon"
    for _ in range(2):
        found = meter.shares()
        assert found["goodput/total"] == pytest.approx(0.5)
        assert sum(share for name, share in found.items() if name != "goodput/total") == pytest.approx(1)


def test_a_killed_attempt_is_in_no_window_of_the_next(tmp_path: Path) -> None:
    run = made(tmp_path / "p" / "r", attempts=2)
    for number in (1, 2):
        record(run, f"7_0.{number - 1}", 1000.0 * number, 1000.0 * number + 65, over=False)
    found = account_since(run, 2, 2030.0, 2050.0)
    assert found
    assert (found.total, found.goodput) == pytest.approx((40, 0.5))
    assert {row.attempt for row in found.rows} == {2}


def test_each_category_has_a_colour_in_reports() -> None:
    colours = (ROOT / "hpcrl" / "observe" / "report" / "page" / "elements.js").read_text().partition("USE_COLOURS")[2]
    assert [name for name in CATEGORIES if f'{name}: "#' not in colours and f'"{name}": "#' not in colours] == []
