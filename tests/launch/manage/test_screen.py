"""What is known of runs as lines: pure functions, at any size of the window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from hpcrl.launch.manage.follow import events
from hpcrl.launch.manage.progress import Progress
from hpcrl.launch.manage.screen import RunView, bar, details, one_run, several_runs, sparkline
from hpcrl.launch.manage.state import RunState
from hpcrl.launch.scheduler import JobState
from hpcrl.observe.live_status import LiveStatus, ProcessRow
from hpcrl.observe.summary import Headline
from hpcrl.rundir.alerts import Alert, AlertEvent
from hpcrl.rundir.layout import Run

PROGRESS = Progress("step 12/40", 12, 40, 3.0, 1, 2, "s000010", 35.0, 1.0)
HEADLINE = Headline(1, 11, (0, 0.25), (10, 0.5), None, None, (1, 0.1), (11, 0.62), 63.0, None, "")
LIVE_STATUS = LiveStatus(
    [
        ProcessRow("agent-0", "watching", ["512.0 MiB", "n1"]),
        ProcessRow("rollout-0", "generating", ["version 11", "2.0 GiB", "n2"]),
        ProcessRow("trainer", "step 12/40", ["3.1 GiB", "n1"]),
    ],
    [0.1, 0.2, 0.4, 0.62],
    True,
    1234.5,
    ["host 3.1 GiB", "GPU 40.0 GiB"],
)
KL = Alert(AlertEvent("kl", "raised", 7, 1, 1.0, "policy/policy_kl is 0.3, above 0.1"), True)


def view(kind: str = "running", detail: str = "", name: str = "mine", **more: Any) -> RunView:
    run = Run(Path("/runs/project") / name)
    submission = {"job_id": "7_0", "executor": "slurm", "overrides": ["trainer.seed=1"]}
    job = JobState("PENDING" if kind == "pending" else "RUNNING")
    state = RunState(run, submission, job, 1, None, [], PROGRESS, kind, detail, "")
    return RunView(run, state, PROGRESS, HEADLINE, LIVE_STATUS, **more)


def shown(view: RunView, width: int = 100, height: int = 40) -> list[str]:
    return [line.plain for line in one_run(view, width, height)]


def test_all_that_is_known() -> None:
    assert shown(view(alerts=[KL])) == [
        "project/mine: running",
        "  step 12/40 · 3.0 s/step · ETA 1:27 · replicas 1/2 · last commit 35 s ago (s000010)",
        "  progress    ████████░░░░░░░░░░░░░░░░░░░░░░ 28%",
        "  eval score  0.250 (step 0) → 0.500 (step 10)",
        "  reward      0.100 (step 1) → 0.620 (step 11)  ▁▂▅█",
        "  steps       11",
        "  time        1:03",
        "  tokens/s    1,234 in the newest step",
        "  memory      host 3.1 GiB, GPU 40.0 GiB (the trainer rank that needed most)",
        "  alert       kl at step 7: policy/policy_kl is 0.3, above 0.1",
        "  checkpoint  s000010",
        "  attempt     1",
        "  job         7_0 (slurm, running)",
        "  overrides   trainer.seed=1",
        "  directory   /runs/project/mine",
        "  trainer     step 12/40 · 3.1 GiB · n1",
        "  rollout-0   generating · version 11 · 2.0 GiB · n2",
        "  agent-0     watching · 512.0 MiB · n1",
    ]


def test_nothing_is_known_yet() -> None:
    lines = shown(RunView(Run(Path("/runs/project/mine"))))
    assert lines == ["project/mine: not known yet", "  checkpoint  none", "  directory   /runs/project/mine"]


@pytest.mark.parametrize("width", [20, 60, 200])
@pytest.mark.parametrize("height", [1, 2, 6, 12, 50])
def test_every_window_is_enough(width: int, height: int) -> None:
    waits = "ReqNodeNotAvail: nodes that it needs are down or reserved; Slurm expects it to start at 2026-12-01 10:00"
    for one in (view(alerts=[KL] * 9), view("pending", waits), view("failed", "日本語" * 60)):
        lines = shown(one, width, height)
        assert 0 < len(lines) <= height
        assert max(map(cell_len, lines)) <= width
        several = [line.plain for line in several_runs([one] * 30, width, height)]
        assert 0 < len(several) <= height
        assert max(map(cell_len, several)) <= width


def test_a_low_window_shows_what_matters_most() -> None:
    lines = shown(view(alerts=[KL]), 60, 7)
    assert [line.split()[0] for line in lines[3:]] == ["progress", "eval", "reward", "alert"]
    assert shown(view(files_age=12.0), 60, 4)[-1] == "  trouble  this is 12 s old: the filesystem does not answer"


def test_why_it_waits_and_for_how_long_nobody_answered() -> None:
    waits = "Priority: jobs with a higher priority come first; Slurm expects it to start at 14:30:00"
    lines = shown(replace(view("pending", waits, state_age=50.0)), 60)
    assert lines[:3] == [
        "project/mine: pending",
        "  Priority: jobs with a higher priority come first; Slurm",
        "  expects it to start at 14:30:00",
    ]
    assert lines[-1] == "  trouble     the state is 50 s old: Slurm does not answer"


def test_what_is_not_known_is_said() -> None:
    unknown = replace(view(), progress=replace(PROGRESS, seconds_per_step=None))
    assert "step 12/40 · ETA unknown · replicas 1/2" in shown(unknown)[1]
    assert PROGRESS.eta == 87.0


def test_a_run_that_is_over_shows_no_processes_and_no_bar() -> None:
    state = view().state
    assert state
    over = replace(view(), state=replace(state, job=JobState("GONE"), kind="done", detail="finished"))
    lines = shown(over)
    assert lines[:2] == ["project/mine: done", "  11 steps · reward 0.100 → 0.620 · eval 0.250 → 0.500 · 1:03"]
    assert not any(line.split()[0] in ("progress", "trainer") for line in lines)


def test_supervised_runs_have_a_loss() -> None:
    offline = replace(view(), headline=replace(HEADLINE, reward_first=None, reward_last=None))
    offline = replace(offline, live=replace(LIVE_STATUS, curve=[2.0, 1.0], is_reward=False))
    assert ("loss", "2.000 → 1.000  █▁") in details(offline)


def test_what_files_say_cannot_steer_a_terminal() -> None:
    state = view().state
    assert state
    wild = replace(
        view("failed", "\x1b[2Jgone\nfor ever", name="a\x1b]0;b"),
        live=LiveStatus([ProcessRow("trainer\x07", "\x1b[31mred", ["\r"])]),
        alerts=[Alert(AlertEvent("kl\x1b", "raised", 1, 1, 1.0, "\x9b2J"))],
        complaint="\x1b[H",
    )
    texts = [*shown(wild), *(line.plain for line in several_runs([wild, wild], 80, 5))]
    assert all(text.isprintable() for text in texts), texts


def test_a_line_per_run_of_a_sweep() -> None:
    views = [view("done", name="s.0"), view(name="s.1", alerts=[KL]), view("pending", "Priority", name="s.2-lr-1e-3")]
    lines = [line.plain for line in several_runs(views, 60, 10)]
    assert lines == [
        "s.0          done      ██░░░░░░ 0.620 ▁▂▅█  11 steps · rewa…",
        "s.1          running   ██░░░░░░ ! kl  0.620 ▁▂▅█  step 12/4…",
        "s.2-lr-1e-3  pending   ██░░░░░░ 0.620 ▁▂▅█  Priority",
    ]
    few = [line.plain.split("  ")[0] for line in several_runs([*views, view(name="s.3")], 60, 3)]
    assert few == ["s.1", "s.3", "and 1 done, 1 pending"]


def test_events_are_said_when_a_state_changes() -> None:
    said = {what: (state, text) for what, state, text in events(view(alerts=[KL]))}
    assert said.keys() == {"agent-0", "rollout-0", "trainer", "eval score", "alert kl 7"}
    assert said["trainer"] == (
        "step 12/40",
        "step 12/40 · 3.0 s/step · ETA 1:27 · replicas 1/2 · last commit 35 s ago (s000010) · reward 0.62",
    )
    waits = list(events(view("pending", "Priority: others come first; at 14:30")))
    assert waits[0] == ("run", "pending ", "pending: Priority: others come first; at 14:30")
    assert next(events(view("saving", "saving · step 12/40"))) == ("run", "saving ", "saving · step 12/40")


def test_bars_and_curves() -> None:
    assert [bar(share, 4) for share in (0.0, 0.3, 0.99, 1.0)] == ["░░░░", "█░░░", "███░", "████"]
    assert sparkline([], 5) == ""
    assert sparkline([3.0], 5) == "▁"
    assert sparkline([0, 7, float("nan"), float("inf")], 9) == "▁█  "
    assert sparkline(range(100), 4) == "▁▃▆█"
