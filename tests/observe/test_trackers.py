"""A tracker gets each value of a step once, over restarts, and cannot hurt the run. The processes are real; the tracker is a user's own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.sections.trainer import LOGGERS
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.report.content import content_of
from hpcrl.observe.tensorboard.hparams import hparams_of
from hpcrl.observe.tensorboard.texts import configuration
from hpcrl.observe.trackers.base import senders, trackers_of
from hpcrl.observe.trackers.packages import TRACKERS
from hpcrl.observe.trackers.send import MetricSender, Sent, _tracked
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime import followers
from hpcrl.runtime.followers import Followers
from tests.paths import QUICKSTART, ROOT

OWN = "tests.observe.own_tracker:Lines"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "project" / "rate.0-lr-1")
    write_text(run.config, Config.from_toml([QUICKSTART], [f"trainer.logger=['tensorboard', '{OWN}']"]).to_toml())
    return run


def write(run: Run, attempt: int, resume: int, steps: range, process: str = "trainer") -> None:
    with MetricsWriter(run, process, attempt, resume) as writer:
        for step in steps:
            writer.write(step, {"x": 1000 * attempt + step})


def told(run: Run, name: str = OWN) -> list[dict[str, Any]]:
    path = run.tracker(name).with_suffix("") / "lines.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def points(run: Run, metric: str = "x") -> list[tuple[int, float]]:
    return [(line["step"], line["value"]) for line in told(run) if line.get("name") == metric and "step" in line]


def wait(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_known_trackers_are_those_of_the_configuration() -> None:
    assert (*("tensorboard",), *TRACKERS) == LOGGERS
    assert trackers_of("tensorboard") == []
    assert trackers_of(["console", "tensorboard", OWN, "console"]) == ["console", OWN]


def test_each_value_once_over_restarts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Followers(run, 1, senders(run, [OWN, "console"])):
        write(run, 1, 0, range(1, 6))
        write(run, 1, 0, range(1, 3), "rollout-0")
        wait(lambda: len(points(run)) == 5)
        write(run, 2, 3, range(4, 5))  # notices a resume while it goes on
    with Followers(run, 2, senders(run, [OWN])):
        write(run, 2, 3, range(5, 8))
    assert points(run) == [*((step, 1000 + step) for step in range(1, 6)), (6, 2006), (7, 2007)]
    assert points(run, "x/rollout-0") == [(1, 1001), (2, 1002)]
    opened = [line for line in told(run) if "opened" in line]
    assert opened[0] == opened[1]
    assert (opened[0]["project"], opened[0]["name"], opened[0]["group"]) == ("project", "rate.0-lr-1", "rate")
    assert sum("closed" in line for line in told(run)) == 2
    assert "step 3 x 1003\n" in run.log(1, "tracker-console").read_text()


def test_what_leaves_a_run_has_no_secrets_of_its_configuration(run: Run) -> None:
    """config.toml is for its user; trackers and reports are for others."""
    settings = [
        "environment.skyrl_gym.search.search_url=http://me:pa55@h:1/x?api_key=q9z",
        "slurm.setup=['export A_TOKEN=hf_1', 'export B_TOKEN=\"hf_2 w7w\"', \"export PASSWORD='$hf_3 w7w'\"]",
        'slurm.extra.export="ALL,A_SECRET=\\"hf_4 w7w\\""',
    ]
    write_text(run.config, Config.from_toml([QUICKSTART], settings).to_toml())
    write_text(run.submission, json.dumps({"overrides": settings}))
    reported = content_of(run, lambda _: str)
    left = [
        str(_tracked(run, OWN, Sent("x"), None).configuration), json.dumps(reported["config"]), json.dumps(reported["environment"]),
        configuration(run), str(list(hparams_of(run))),
    ]  # fmt: skip
    for text in left:
        assert not [
            secret for secret in ("pa55", "q9z", "w7w", *(f"hf_{number}" for number in range(1, 5))) if secret in text
        ]
    assert "http://…@h:1/x?api_key=…" in left[0]
    assert "export A_TOKEN=…" in left[0]


def test_one_that_is_down_or_stuck_holds_nothing_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(followers, "_LAST_WORDS_S", 1.0)
    write(run, 1, 0, range(1, 6))
    down, stuck = (OWN.replace("Lines", name) for name in ("Down", "Stuck"))
    logs = {name: run.log(1, f"tracker-{name.replace(':', '.')}") for name in (down, stuck)}
    with Followers(run, 1, senders(run, [down, stuck, OWN, "no.such:tracker"])) as sending:
        wait(lambda: len(points(run)) == 5)
        wait(lambda: "stuck" in logs[stuck].read_text())
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert all(process.poll() is not None for process in sending.processes)
    assert "the tracker is down" in logs[down].read_text()
    assert MetricSender(run, down)._sent.steps == {}, "what it did not take is sent later"


def test_sync_sends_what_is_missing_and_anew_what_counts(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 1, 0, range(1, 6))
    write_text(run.config, Config.from_toml([QUICKSTART], ["trainer.group_name=mine"]).to_toml())
    for expected in (5, 0):
        assert main(["sync", str(run.path), "--to", OWN]) == 0
        assert f"{expected} values sent" in capsys.readouterr().out
    write(run, 2, 3, range(4, 6))
    assert main(["sync", str(run.path), "--to", OWN, "--anew"]) == 0
    assert "5 values sent" in capsys.readouterr().out
    assert points(run)[5:] == [(1, 1001), (2, 1002), (3, 1003), (4, 2004), (5, 2005)]
    first, _, anew = (line for line in told(run) if "opened" in line)
    assert first["opened"] != anew["opened"]
    assert (first["name"], first["group"]) == ("rate.0-lr-1", "mine")
    assert anew["name"].startswith("rate.0-lr-1-")
    assert main(["sync", str(run.path), "--to", "no.such:tracker"]) == 2


def test_a_missing_package_is_named_with_its_remedy(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "swanlab", None)
    assert main(["sync", str(run.path), "--to", "swanlab"]) == 5
    assert "pip install 'hpcrl[swanlab]'" in capsys.readouterr().err
