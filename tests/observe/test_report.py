"""What a report says of a run; how it looks in a browser is tests/observe/test_report_page.py."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpcrl.cli.main import main
from hpcrl.errors import RunError
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.report import live as live_module
from hpcrl.observe.report.content import content_of
from hpcrl.observe.report.curves import curves_of
from hpcrl.observe.report.groups import groups_of
from hpcrl.observe.report.live import LiveReport
from hpcrl.observe.report.samples import token_texts
from hpcrl.observe.report.spans import timeline_of
from hpcrl.observe.report.verdict import RULES, findings
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Outcome
from tests.observe.report_material import HOSTILE, made, write_dump, write_evaluation, write_step
from tests.paths import ROOT


def decoder(_: Run) -> Any:
    return lambda token_ids: " ".join(map(str, token_ids)) + " "


def no_decoder(_: Run) -> Any:
    raise RunError("samples are decoded with transformers, which is not here")


def embedded(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = made(tmp_path, "one", 20)
    meta = write_step(run, 19, [1.0, 0.0, 0.5], dropped={"g00000007": 1.0, "g00000008": None})
    write_dump(run, 19, meta)
    write_step(run, 20, [1.0, 1.0])
    write_evaluation(run, 20, ["right", HOSTILE])
    return run


def test_a_report_is_one_file_that_asks_for_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    assert main(["report", str(run.path), "-o", str(path)]) == 0
    assert "quickstart/one  good  reward:" in capsys.readouterr().out
    text = path.read_text()
    assert re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", text) == []
    assert text.count("<script") == 2, "what a policy said has become a part of the page"
    (content,) = embedded(path)["runs"]
    said = content["samples"]["evaluated"][0]["samples"]
    assert HOSTILE in [part["text"] for sample in said for part in sample["parts"]]
    assert "new uPlot" in text
    assert "Leon Sorokin" in text


def test_what_is_known_of_each_token(run: Run) -> None:
    samples = content_of(run, decoder)["samples"]
    assert [one["step"] for one in samples["trained"]] == [19, 20]
    dumped, plain = (one["samples"] for one in samples["trained"])
    assert [sample["reward"] for sample in dumped[:2]] == [1, 0.5]
    (row,) = dumped[0]["rows"]
    assert row["text"][:2] == ["1 ", "2 "]
    assert (row["by"], row["mask"]) == ("c" * 4 + "p" * 6, "0" * 4 + "1" * 6)
    assert row["columns"] == {
        "logprob": [None] * 4 + [-0.5] * 6,
        "version": [None] * 4 + [18] * 6,
        "advantage": [None] * 4 + [0.25] * 6,
        "entropy": [None] * 4 + [0.7] * 6,
        "mismatch": [None] * 4 + [-0.25] * 6,
    }
    assert row["rewards"] == {9: 1}
    (second,) = next(sample for sample in dumped if sample["name"].endswith(".1"))["rows"]
    assert second["columns"]["advantage"][-1] == 1.25
    assert set(plain[0]["rows"][0]["columns"]) == {"logprob", "version"}
    without = content_of(run, no_decoder)["samples"]
    assert "transformers" in without["note"]
    assert without["trained"][0]["samples"][0]["rows"][0]["text"][:2] == ["1 ", "2 "]


def test_letters_of_several_tokens() -> None:
    halves = {(1,): "a", (2,): "\ufffd", (2, 3): "é", (4,): "b"}
    assert token_texts([1, 2, 3, 4], lambda ids: halves[tuple(ids)]) == ["a", "", "é", "b"]
    assert token_texts([7, 8], None) == ["7 ", "8 "]


def test_groups_and_why_some_were_dropped(run: Run) -> None:
    groups = content_of(run, decoder)["groups"]
    assert groups["steps"] == [19, 20]
    assert groups["alike"] == [0, 1]
    assert [sum(row) for row in groups["reward"]["counts"]] == [3, 2]
    assert groups["reward"]["counts"][0][0] == groups["reward"]["counts"][0][-1] == 1
    assert groups["dropped"]["counts"] == [2, 0]
    assert [(one["group"], one["why"]) for one in groups["dropped"]["some"]] == [
        ("g00000007", "all its samples are worth 1"),
        ("g00000008", "all its samples failed"),
    ]


def test_samples_that_failed_are_in_no_distribution_of_rewards(tmp_path: Path) -> None:
    run = Run(tmp_path / "failed")
    write_step(run, 1, [1.0, 0.5, 0.0], stop_reasons=["stop", "failed", "stop"])
    write_step(run, 2, [0.0, 0.0], stop_reasons=["failed", "failed"])
    groups = groups_of(run)
    assert groups is not None
    assert [sum(row) for row in groups["reward"]["counts"]] == [2, 0]
    assert groups["alike"] == [0, None]
    assert groups["stops"]["failed"] == [0.33333, 1]


def test_attempts_configuration_and_environment(run: Run) -> None:
    content = content_of(run, decoder)
    assert [(one["kind"], one["after"], one["hosts"]) for one in content["attempts"]] == [
        ("interrupted", 0, ["n1"]),
        ("done", 10, ["n2"]),
    ]
    settings = {path: (value, changed) for path, value, changed in content["config"]}
    assert settings["trainer.max_steps"] == ("20", True)
    assert settings["generator.n_samples_per_prompt"] == ("8", True)
    known = dict(content["environment"])
    assert (known["overrides"], known["hosts"], known["torch"]) == ("trainer.seed=1", "n1, n2", "2.13.0")


def test_replicas_are_put_together_and_long_runs_are_thinned(tmp_path: Path) -> None:
    curves = curves_of(made(tmp_path, "long", 2500, replicas=3), 0.0)
    assert curves["each"] == 3
    assert len(curves["steps"]) == 834
    assert curves["steps"][-1] == 2500
    assert curves["metrics"]["generate/idle_ratio"][-1] == pytest.approx(0.2, abs=1e-3)
    assert curves["metrics"]["generate/idle_ratio/min"][-1] == pytest.approx(0.1, abs=1e-3)
    assert curves["metrics"]["generate/idle_ratio/max"][-1] == pytest.approx(0.3, abs=1e-3)
    assert all(len(values) == 834 for values in curves["metrics"].values())


def test_shares_of_a_coarse_timeline_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path, "one", 40)

    def sums(timeline: Any) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for name, process in timeline["processes"].items():
            parts = found.setdefault(name, {})
            for kind, lasted in zip(process["spans"][::2], process["spans"][1::2], strict=True):
                parts[timeline["kinds"][kind]] = parts.get(timeline["kinds"][kind], 0) + lasted
        return found

    fine = timeline_of(run, 0.0)
    monkeypatch.setattr("hpcrl.observe.report.spans._MOST_SPANS", 60)
    coarse = timeline_of(run, 0.0)
    assert fine
    assert coarse
    assert list(fine["processes"]) == ["rank-0", "rollout-0", "rollout-1"]
    assert all(len(process["spans"]) <= 40 for process in coarse["processes"].values())
    assert coarse["processes"]["rank-0"]["resolution"] > 0 == fine["processes"]["rank-0"]["resolution"]
    for name, parts in sums(fine).items():
        assert sum(parts.values()) == pytest.approx(80_000, abs=5)
        assert sums(coarse)[name] == pytest.approx(parts, abs=45), "some rounding per span"
    assert len(fine["steps"]) == 40


def test_a_report_of_a_thousand_steps_is_small(tmp_path: Path) -> None:
    run = made(tmp_path, "thousand", 1000, metrics=100, ranks=8, replicas=8)
    for step in (998, 999, 1000):
        write_step(run, step, [float(at) for at in range(8)], response=5000)
    path = tmp_path / "report.html"
    assert main(["report", str(run.path), "-o", str(path)]) == 0
    assert path.stat().st_size < 10e6
    (content,) = embedded(path)["runs"]
    assert [one["step"] for one in content["samples"]["trained"]] == [998, 999, 1000]
    assert content["samples"]["trained"][0]["samples"][0]["rows"][0]["left_out"] == 1004


def test_several_runs_and_one_that_has_only_begun(run: Run, tmp_path: Path) -> None:
    begun = Run(tmp_path / "quickstart" / "begun")
    begun.path.mkdir()
    begun.config.write_bytes(run.config.read_bytes())
    path = tmp_path / "report.html"
    assert main(["report", "one", "begun", "--root", str(tmp_path), "-o", str(path)]) == 0
    one, other = embedded(path)["runs"]
    assert (one["name"], other["name"]) == ("quickstart/one", "quickstart/begun")
    assert (other["findings"], other["timeline"], other["groups"], other["attempts"]) == ([], None, None, [])


def said(metrics: dict[str, list[float]], *outcomes: Outcome, finite: bool = True) -> dict[str, tuple[str, str]]:
    curves = {"metrics": metrics, "finite": finite}
    settings = {
        "trainer.fully_async.max_staleness_steps": 1,
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 100,
    }
    return {one.name: (one.status, one.text) for one in findings(curves, settings, outcomes)}


def test_verdict() -> None:
    rising, noise = [at / 100 for at in range(100)], [0.5, 0.4, 0.6, 0.45] * 25
    assert said({"reward/avg_raw_reward": rising})["reward"][0] == "good"
    assert said({"reward/avg_raw_reward": rising[::-1]})["reward"][0] == "bad"
    assert said({"reward/avg_raw_reward": noise})["reward"][0] == "look"
    assert said({"eval/all/avg_score": [0.2, 0.9, 0.1]})["evaluation"] == (
        "look",
        "0.200 before, 0.100 at the end, 0.900 at best",
    )
    assert said({"eval/all/loss": [2.0, 1.0]})["validation loss"][0] == "good"
    assert said({"policy/policy_entropy": [1.0] * 50 + [0.01] * 50})["entropy"][0] == "look"
    assert said({"generate/stop_ratio": [0.3] * 10})["truncation"][0] == "bad"
    assert said({"async/staleness_max": [1.0]})["staleness"][0] == "good"
    assert said({"async/staleness_max": [2.0]})["staleness"][0] == "bad"
    assert said({"policy/grad_norm": [1.0] * 9 + [500.0]})["gradient"][0] == "look"
    assert said({}, finite=False)["numbers"][0] == "bad"
    lost = Outcome(1, "lost", "it ended without a word", "n", 0.0)
    assert said({}, lost)["attempts"] == ("look", "1 of 1 failed; the last: lost, it ended without a word")
    assert said({}) == {}


ALIKE, ADVANTAGE, REWARD = "reward/groups_without_spread", "loss/avg_raw_advantages_abs", "reward/avg_raw_reward"


def test_a_run_that_learns_nothing_is_bad_from_its_first_step_on() -> None:
    nothing = said({ALIKE: [1.0], ADVANTAGE: [0.0], REWARD: [0.0], "policy/grad_norm": [0.0]})
    assert {name: status for name, (status, _) in nothing.items()} == dict.fromkeys(
        ("learning", "reward", "gradient"), "bad"
    )
    assert nothing["gradient"][1] == "norm 0 in every step: no weight has learned anything"
    assert nothing["reward"][1] == "0.000 in every step"
    assert "hpcrl samples" in nothing["learning"][1]
    assert said({REWARD: [0.5] * 4})["reward"][0] == "bad"
    assert said({ALIKE: [1.0] * 4, ADVANTAGE: [0.1] * 4})["learning"][0] == "look", "a critic learns from it"
    taught = said({ALIKE: [1.0], ADVANTAGE: [0.0], REWARD: [0.0], "distillation/divergence": [0.3]})
    assert taught == {}, "a teacher's policy needs no rewards"
    assert said({ALIKE: [0.9] * 10})["learning"][0] == "look"
    assert said({ALIKE: [0.5] * 10})["learning"][0] == "good"
    assert said({"policy/grad_norm": [0.0, 0.0, 0.0, 1.0]})["gradient"][0] == "look"
    assert said({"policy/grad_norm": [0.0, 1.0, 1.0, 1.0]})["gradient"][0] == "good"


def test_verdicts_of_what_goes_wrong_late() -> None:
    entropy, alike = {"policy/policy_entropy": [1.0] * 50 + [0.001] * 50}, {ALIKE: [0.2] * 50 + [1.0] * 50}
    assert said(entropy | alike | {"reward/avg_pass_at_4": [0.3] * 100})["entropy"][0] == "bad"
    assert said(entropy | alike | {"reward/avg_pass_at_4": [1.0] * 100})["entropy"][0] == "look", "all are solved"
    assert said(entropy)["entropy"][0] == "look"
    lengths = {"generate/avg_num_tokens": [50.0] * 50 + [95.0] * 50}
    assert said(lengths)["length"][0] == "bad"
    assert "generator.sampling_params.max_generate_length = 100" in said(lengths)["length"][1]
    assert said({"generate/avg_num_tokens": [50.0, 80.0]})["length"][0] == "good"
    rising, falling = {REWARD: [at / 100 for at in range(100)]}, {"eval/all/avg_score": [0.5, 0.3]}
    assert said(rising | falling)["overfitting"][0] == "bad"
    assert "overfitting" not in said(rising | {"eval/all/avg_score": [0.3, 0.5]})
    assert "overfitting" not in said({REWARD: [0.5, 0.4] * 50} | falling)
    mismatch = "policy/rollout_train_logprobs_abs_diff_mean"
    assert said({mismatch: [0.01] * 50 + [0.05] * 50})["mismatch"][0] == "look"
    assert said({mismatch: [0.04] * 100})["mismatch"][0] == "good"


def test_each_rule_of_the_verdict_is_in_the_documentation() -> None:
    """With its metrics and its thresholds, word by word."""
    page = (ROOT / "docs" / "watching.md").read_text()
    for rule in RULES:
        metrics = ", ".join(f"`{name}`" for name in rule.metrics)
        assert f"| {rule.name} | {metrics} | {rule.look} | {rule.bad} |\n" in page


@pytest.fixture
def served(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveReport]:
    monkeypatch.setattr(live_module, "_EVERY_S", 0.0)
    live = LiveReport([run], decoder, 0)
    thread = threading.Thread(target=live.serve)
    thread.start()
    yield live
    live.close()
    thread.join()


def test_a_live_report_wants_its_token(served: LiveReport) -> None:
    address, _, token = served.url.partition("?token=")
    assert address.startswith("http://127.0.0.1:")
    with httpx.Client(trust_env=False) as client:
        for path in ("", "content", "content?samples=1", "../config.toml"):
            assert client.get(address + path).status_code == 403
            assert client.get(address + path, params={"token": token[:-1]}).status_code == 403
            assert client.get(address + path, headers={"Authorization": "Bearer x"}).status_code == 403
        answer = client.get(served.url)
        assert answer.status_code == 200
        assert token not in answer.text
        assert (answer.headers["cache-control"], answer.headers["referrer-policy"]) == ("no-store", "no-referrer")
        assert client.get(f"{address}secrets/token", params={"token": token}).status_code == 404
    with pytest.raises(RunError, match=f"127.0.0.1:{served.port} cannot be served"):
        LiveReport([], decoder, served.port)


def test_a_live_report_follows_a_run(served: LiveReport, run: Run) -> None:
    address, _, token = served.url.partition("?token=")
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {token}"}) as client:
        before = client.get(f"{address}content").json()[0]
        assert (before["curves"]["steps"][-1], before["samples"]) == (20, None)
        with MetricsWriter(run, "trainer", 3, 20) as writer:
            writer.write(21, {"timing/step": 1.0})
        after = client.get(f"{address}content?samples=1").json()[0]
        assert after["curves"]["steps"][-1] == 21
        assert after["samples"]["trained"]
        run.attempts.write_text("[1]\n")
        damaged = client.get(f"{address}content")
        assert damaged.status_code == 503
        assert f"{run.attempts}, line 1" in damaged.text


def test_a_live_report_has_few_connections(served: LiveReport) -> None:
    """Whoever else is on the machine opens hundreds, and says nothing: the reader's request is answered after those have timed out."""
    most = 0
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 10))
            most = max(most, sum("process_request_thread" in thread.name for thread in threading.enumerate()))
        assert most <= 32
        assert httpx.get(served.url, trust_env=False, timeout=120).status_code == 200


def test_a_live_report_waits_where_there_is_no_descriptor(run: Run) -> None:
    live = LiveReport([run], decoder, 0)
    thread = threading.Thread(target=live.serve)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection(("127.0.0.1", live.port), 10))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        selector = os.open("/dev/null", os.O_RDONLY)
        os.close(selector)
        resource.setrlimit(resource.RLIMIT_NOFILE, (selector + 2, hard))  # for the selector of `serve`
        try:
            thread.start()
            time.sleep(0.5)
            began = time.process_time()
            time.sleep(1.5)
            spent = time.process_time() - began
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert spent < 0.3, "it tries to accept without end"
    assert httpx.get(live.url, trust_env=False, timeout=60).status_code == 200
    live.close()
    thread.join()
