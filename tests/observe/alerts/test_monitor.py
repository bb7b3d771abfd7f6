"""AlertMonitor are told once over restarts, and hurt nothing: real processes, real files, a real server for the webhook."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.errors import CommitError
from hpcrl.observe.alerts import notify
from hpcrl.observe.alerts.monitor import AlertMonitor, main, monitor_process, rules_of
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.summary import WITHOUT_SPREAD
from hpcrl.rundir.alerts import AlertEvent, append_event, read_alerts
from hpcrl.rundir.commit import read_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt
from hpcrl.runtime.followers import Followers
from hpcrl.runtime.signals import stop_asked, stop_cause
from tests.observe.test_trackers import wait
from tests.paths import QUICKSTART, ROOT

ENTROPY, STEP = "policy/policy_entropy", "timing/step"
LOW = "trainer.alerts.rules.low={kind='entropy_below', value=0.5, steps=2}"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "project" / "run")
    configure(run, LOW)
    open_attempt(run, "local-1", ["n1"])
    return run


def configure(run: Run, *settings: str) -> None:
    write_text(run.config, Config.from_toml([QUICKSTART], settings).to_toml())


def alerts_of(run: Run, attempt: int = 1) -> AlertMonitor:
    return AlertMonitor(run, attempt, Config.from_toml([run.config]).trainer)


def train(run: Run, attempt: int, resume: int, *entropies: float) -> None:
    with MetricsWriter(run, "trainer", attempt, resume) as writer:
        for step, entropy in enumerate(entropies, resume + 1):
            writer.write(step, {ENTROPY: entropy, STEP: 1.0})


def told(run: Run) -> list[str]:
    return [str(alert) for alert in read_alerts(run)]


FOUND = "policy/policy_entropy is 0.1, below 0.5, 2 times in a row"


def test_one_alert_per_crossing(run: Run) -> None:
    alerts = alerts_of(run)
    train(run, 1, 0, 1.0, 0.1)
    alerts.poll()
    assert told(run) == []
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        for step, entropy in enumerate((0.1, 0.1, 0.1, 1.0, 0.1, 0.1), 3):
            writer.write(step, {ENTROPY: entropy})
            alerts.poll()
    assert told(run) == [f"low at step 3: {FOUND}; over at step 6", f"low at step 8: {FOUND}"]
    assert all(alert.notified for alert in read_alerts(run))


def test_one_alert_over_restarts(run: Run) -> None:
    """What lasts is not told again, steps that are trained again neither, and what nobody looked at is told late."""
    train(run, 1, 0, 1.0, 0.1, 0.1, 0.1)
    alerts_of(run).poll()
    open_attempt(run, "local-2", ["n1"])
    second = alerts_of(run, 2)
    train(run, 2, 1, 1.0, 0.1, 0.1, 0.1)  # steps 2 to 5
    second.poll()
    assert told(run) == [f"low at step 3: {FOUND}"]
    train(run, 2, 5, 1.0, 0.1, 0.1)  # nobody looks
    open_attempt(run, "local-3", ["n1"])
    third = alerts_of(run, 3)
    third.poll()
    train(run, 3, 8, 0.1, 1.0)
    third.poll()
    assert told(run) == [f"low at step 3: {FOUND}; over at step 6", f"low at step 8: {FOUND}; over at step 10"]
    assert [alert.begin.attempt for alert in read_alerts(run)] == [1, 3]


def test_an_attempt_that_is_over_writes_no_alert(run: Run) -> None:
    first = alerts_of(run)
    open_attempt(run, "local-2", ["n1"])
    train(run, 1, 0, 0.1, 0.1)
    with pytest.raises(CommitError, match="attempt 2 has begun"):
        first.poll()
    assert told(run) == []


def test_a_metric_that_nobody_reports_is_said_with_the_nearest(run: Run) -> None:
    rules = "trainer.alerts.rules={a={kind='above', metric='policy/policy_entropie', value=1}, b={kind='score_fell', value=1}}"
    configure(run, rules)
    alerts = alerts_of(run)
    for resume in (0, 1, 2):
        train(run, 1, resume, 1.0)
        alerts.poll()
    said = "a at step 1: step 1 reported no metric policy/policy_entropie; did you mean policy/policy_entropy?"
    assert told(run) == [said], "evaluations are awaited for longer"
    alerts_of(run).poll()
    with MetricsWriter(run, "trainer", 1, 3) as writer:
        writer.write(4, {"policy/policy_entropie": 2.0})
    alerts.poll()
    assert told(run) == [f"{said}; over at step 4", "a at step 4: policy/policy_entropie is 2, above 1"]


def test_rewards_that_are_all_alike_are_marked_without_a_rule(run: Run) -> None:
    """After three steps; groups of one sample report no spread, which is no missing metric, and nobody's run is stopped."""
    configure(run)
    alerts = alerts_of(run)
    train(run, 1, 0, 1.0, 1.0)
    alerts.poll()
    assert told(run) == []
    with MetricsWriter(run, "controller", 1, 0) as writer:
        for step, share in enumerate((1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.9), 1):
            writer.write(step, {WITHOUT_SPREAD: share})
    alerts.poll()
    found = "reward/groups_without_spread is 1, above 0.99, 3 times in a row"
    assert told(run) == [f"learning at step 6: {found}; over at step 7"]
    assert stop_asked(run, 1) is None
    teacher = ["trainer.distillation.enable=true", "trainer.distillation.model_path=x"]
    silent = "trainer.alerts.steps_without_signal=0"
    assert monitor_process(run, 1, Config.from_toml([QUICKSTART], teacher).trainer) == {}
    assert monitor_process(run, 1, Config.from_toml([QUICKSTART], [silent]).trainer) == {}
    own = Config.from_toml([QUICKSTART], ["trainer.alerts.rules.learning={kind='no_spread_above', value=0.5}"])
    assert rules_of(own.trainer.alerts, rewarded=True)["learning"].value == 0.5


def test_no_progress(run: Run) -> None:
    configure(run, "trainer.alerts.rules.stuck={kind='no_progress', minutes=0.005, stop=true}")  # 0.3 s
    alerts = alerts_of(run)
    train(run, 1, 0, 1.0, 1.0)
    alerts.poll()
    assert told(run) == []
    time.sleep(0.4)
    alerts.poll()
    alerts.poll()
    said = "stuck at step 2: no step was trained and no evaluation ended for 0.005 minutes"
    assert told(run) == [said]
    assert stop_asked(run, 1) == "cancelled"
    assert stop_cause(run, 1).startswith("alert stuck: no step was trained")
    open_attempt(run, "local-2", ["n1"])
    assert (stop_asked(run, 2), stop_cause(run, 2)) == (None, "")
    second = alerts_of(run, 2)
    time.sleep(0.4)
    second.poll()
    assert told(run) == [said], "it still makes no progress"
    train(run, 2, 2, 1.0)
    second.poll()
    assert told(run) == [f"{said}; over at step 3"]


def test_a_filesystem_that_fails_loses_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    train(run, 1, 0, 0.1, 0.1)
    unreadable = run.metrics_of("zz")
    unreadable.mkdir()  # read after the metrics of the trainer
    goes_on = iter([True, False])

    def again() -> bool:
        if (more := next(goes_on)) is False:
            unreadable.rmdir()
        return more

    main(str(run.path), 1, again)
    assert "waiting for the filesystem: " in capsys.readouterr().out
    assert told(run) == [f"low at step 2: {FOUND}"]


def program(path: Path, text: str) -> str:
    write_text(path, f"#!/bin/sh\n{text}\n", mode=0o700)
    return str(path)


def test_a_command_gets_the_facts_and_no_shell(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = 'echo "said: $1"; env | grep ^HPCRL_ALERT_ | sort > facts; cat'
    command = program(tmp_path / "own program", wanted)
    configure(run, LOW, f"trainer.alerts.command={json.dumps([command, '$HOME; `id`'])}")
    train(run, 1, 0, 0.1, 0.1)
    alerts_of(run).poll()
    lines = (run.path / "facts").read_text().splitlines()
    facts = {name: value for name, _, value in (line.partition("=") for line in lines)}
    assert facts["HPCRL_ALERT_TEXT"] == f"project/run: low at step 2: {FOUND}"
    assert (facts["HPCRL_ALERT_NAME"], facts["HPCRL_ALERT_KIND"]) == ("low", "entropy_below")
    assert (facts["HPCRL_ALERT_STEP"], facts["HPCRL_ALERT_PATH"]) == ("2", str(run.path))
    assert "said: $HOME; `id`\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [("sleep 60 & sleep 60", "did not end within 0 s and is killed"), ("exit 3", "ended with 3"), (None, "cannot be run")],
)  # fmt: skip
def test_a_command_that_fails_or_hangs_is_only_logged(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setattr(notify, "_COMMAND_S", 0.2)
    command = program(tmp_path / "own", text) if text else str(tmp_path / "none")
    configure(run, LOW, f"trainer.alerts.command=['{command}']")
    train(run, 1, 0, 0.1, 0.1)
    began = time.monotonic()
    alerts_of(run).poll()
    assert time.monotonic() - began < 5
    assert said in capfd.readouterr().out
    assert [alert.notified for alert in read_alerts(run)] == [True]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[Any], list[int]]]:
    """A server that keeps what it is sent and answers with the next of the statuses, then with 200."""
    got, statuses = list[Any](), list[int]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses.pop(0) if statuses else 200)
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/secret-path", got, statuses
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_is_sent_json_again_where_it_fails(
    run: Run, tmp_path: Path, webhook: tuple[str, list[Any], list[int]],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(notify, "_AGAIN_S", 0.0)
    address, got, statuses = webhook
    statuses += [503, 502]
    (tmp_path / "address").write_text(f"{address}\n")
    configure(run, LOW, f"trainer.alerts.webhook_file={tmp_path / 'address'}")
    train(run, 1, 0, 0.1, 0.1)
    alerts_of(run).poll()
    assert len(got) == 3
    assert got[2]["text"] == f"project/run: low at step 2: {FOUND}"
    assert (got[2]["name"], got[2]["step"], got[2]["stops"]) == ("low", 2, False)
    said = capfd.readouterr().out
    assert "status 503 (try 1 of 3)" in said
    assert "secret-path" not in said + run.config.read_text()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:1/secret", "webhook: ConnectError (try 3 of 3)"),
        ("http://x:secret/", "webhook: InvalidURL (try 1 of 3)"),
    ],
)
def test_a_webhook_that_is_down_is_only_logged(
    run: Run, address: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "_AGAIN_S", 0.0)
    configure(run, LOW, f"trainer.alerts.webhook={address}")
    train(run, 1, 0, 0.1, 0.1)
    alerts_of(run).poll()
    printed = capfd.readouterr().out
    assert said in printed
    assert "secret" not in printed
    assert [alert.notified for alert in read_alerts(run)] == [True]


def test_who_was_killed_before_telling_has_the_next_attempt_do_it(run: Run, tmp_path: Path) -> None:
    configure(run, LOW, f"trainer.alerts.command=['{program(tmp_path / 'own', 'echo x >> told')}']")
    train(run, 1, 0, 0.1, 0.1)
    append_event(run, AlertEvent("low", "raised", 2, 1, 1.0, FOUND))
    for attempt in (2, 3):
        open_attempt(run, f"local-{attempt}", ["n1"])
        alerts_of(run, attempt).poll()
    assert (run.path / "told").read_text() == "x\n"
    assert told(run) == [f"low at step 2: {FOUND}"]


def test_lines_that_are_damaged_are_left_out(run: Run) -> None:
    for step in (1, 2, 3):
        append_event(run, AlertEvent(f"a{step}", "raised", step, 1, 1.0, "found"))
    run.alerts.write_text(run.alerts.read_text().replace('"step": 2', '"step": 4') + '\n{"alert": "to')
    assert told(run) == ["a1 at step 1: found", "a3 at step 3: found"]


def test_the_process_beside_the_controller(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    configure(run, LOW.replace("steps=2", "steps=2, stop=true"))
    config = Config.from_toml([run.config]).trainer
    with Followers(run, 1, monitor_process(run, 1, config)):
        train(run, 1, 0, 0.1, 0.1)
        wait(lambda: stop_asked(run, 1) == "cancelled")
        train(run, 1, 2, 1.0)  # the last look comes after its end is asked for
    assert told(run) == [f"low at step 2: {FOUND}; over at step 3"]
    assert f"low: raised at step 2: {FOUND}" in run.log(1, "alerts").read_text()
    request = read_json(run.stop)
    assert request is not None
    assert request["cause"] == f"alert low: {FOUND}"


def test_no_rules_no_process(run: Run) -> None:
    silent = "trainer.alerts.steps_without_signal=0"
    assert monitor_process(run, 1, Config.from_toml([QUICKSTART], [silent]).trainer) == {}
    assert monitor_process(run, 1, Config.from_toml([QUICKSTART], [silent, *BEST]).trainer)


BEST = ["trainer.ckpt_keep_best=eval/all/avg_scores", "trainer.ckpt_keep_best_mode=max"]


def test_a_metric_of_a_setting_that_nobody_reports_is_an_alert_when_it_is_first_due(
    run: Run, webhook: tuple[str, list[Any], list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    address, got, _ = webhook
    configure(run, *BEST, f"trainer.alerts.webhook={address}")
    train(run, 1, 0, 1.0, 1.0)
    alerts = alerts_of(run)
    alerts.poll()
    alerts.poll()
    assert told(run) == [], "nothing was evaluated yet"
    with MetricsWriter(run, "controller", 1, 2) as writer:
        writer.write(2, {"eval/all/avg_score": 0.5})
    for _ in range(3):
        alerts.poll()
    text = "step 2 reported no metric eval/all/avg_scores; did you mean eval/all/avg_score"
    (line,) = told(run)
    assert line.startswith(f"trainer.ckpt_keep_best at step 2: {text}")
    assert f"trainer.ckpt_keep_best: missing at step 2: {text}" in capfd.readouterr().out
    assert [(one["name"], one["metric"], one["stops"]) for one in got] == [
        ("trainer.ckpt_keep_best", "eval/all/avg_scores", False)
    ]
    open_attempt(run, "local-2", ["n1"])
    second = alerts_of(run, 2)
    second.poll()
    with MetricsWriter(run, "controller", 2, 2) as writer:
        writer.write(3, {"eval/all/avg_scores": 0.5})
    second.poll()
    assert told(run)[0].endswith("; over at step 3")
    assert len(got) == 1


def test_an_evaluation_whose_samples_all_failed_is_one(run: Run) -> None:
    configure(run, "trainer.ckpt_keep_best=eval/all/avg_score")
    alerts = alerts_of(run)
    with MetricsWriter(run, "controller", 1, 0) as writer:
        writer.write(1, {"eval/all/generate/failed_samples": 8.0})
    alerts.poll()
    alerts.poll()
    (line,) = told(run)
    assert "reported no metric eval/all/avg_score" in line
