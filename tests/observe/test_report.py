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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpcrl.cli.main import main
from hpcrl.errors import RunError
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.report import live as live_module
from hpcrl.observe.report.about import about
from hpcrl.observe.report.content import content_of
from hpcrl.observe.report.curves import curves_of
from hpcrl.observe.report.groups import groups_of
from hpcrl.observe.report.live import LiveReport
from hpcrl.observe.report.samples import chosen, token_texts
from hpcrl.observe.report.spans import timeline_of
from hpcrl.observe.report.verdict import RULES, findings
from hpcrl.observe.summary import EVAL_SCORE, REWARD
from hpcrl.observe.timeline import KINDS
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, Outcome, open_attempt, report_outcome
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
    groups = content["samples"]["evaluated"][0]["groups"]
    assert HOSTILE in [part["text"] for group in groups for sample in group["samples"] for part in sample["parts"]]
    assert "new uPlot" in text
    assert "Leon Sorokin" in text


def test_what_is_known_of_each_token(run: Run) -> None:
    samples = content_of(run, decoder)["samples"]
    assert [one["step"] for one in samples["trained"]] == [19, 20]
    (dumped,), (plain,) = (one["groups"] for one in samples["trained"])
    assert (dumped["rewards"], dumped["prompt"], dumped["truth"]) == ([1, 0, 0.5], "1 2 3 4 ", HOSTILE)
    assert [(sample["name"][-1], sample["reward"]) for sample in dumped["samples"]] == [("0", 1), ("2", 0.5), ("1", 0)]
    (row,) = dumped["samples"][0]["rows"]
    assert row["text"][:2] == ["5 ", "6 "], "the prompt is with the group, once"
    assert (row["by"], row["mask"]) == ("p" * 6, "1" * 6)
    assert row["columns"] == {
        "logprob": [-0.5] * 6,
        "version": [18] * 6,
        "advantage": [0.25] * 6,
        "entropy": [0.7] * 6,
        "mismatch": [-0.25] * 6,
    }
    assert row["rewards"] == {5: 1}
    (last,) = dumped["samples"][-1]["rows"]
    assert last["columns"]["advantage"][-1] == 1.25
    assert set(plain["samples"][0]["rows"][0]["columns"]) == {"logprob", "version"}
    without = content_of(run, no_decoder)["samples"]
    assert "transformers" in without["note"]
    assert without["trained"][0]["groups"][0]["prompt"] == "1 2 3 4 "
    (right, hostile) = sorted(samples["evaluated"][0]["groups"], key=lambda group: group["name"])
    assert (right["prompt"], right["truth"], hostile["rewards"]) == ("sort:", HOSTILE, [1])


def test_prompts_that_differ_stay_with_their_samples(run: Run) -> None:
    write_step(run, 21, [1.0, 0.0], prompts=[[1, 2, 3, 4], [9, 2, 3, 4]])
    (group,) = content_of(run, decoder)["samples"]["trained"][-1]["groups"]
    assert group["prompt"] == ""
    assert [sample["rows"][0]["text"][0] for sample in group["samples"]] == ["1 ", "9 "]
    assert group["samples"][0]["rows"][0]["columns"]["logprob"] == [None] * 4 + [-0.5] * 6


def test_groups_that_are_shown() -> None:
    """That with the greatest spread, the worst and the best; of each the best sample, the worst and what is in between."""
    rewards = [[0.5] * 8, [0.0] * 8, [1.0] * 8, [0.0, 1.0, 0.5] + [0.25] * 5, *[[0.5] * 8] * 4]
    assert list(chosen(rewards, 1)) == [(3, [1, 5, 0]), (1, [0, 4, 7]), (2, [0, 4, 7])]
    assert len(list(chosen([[float(at)] for at in range(50)], 1))) == 9
    assert list(chosen([[1.0, 0.0]], 1)) == [(0, [0, 1])]
    assert list(chosen([], 1)) == [], "of an evaluation no whole line is written yet"


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


def test_the_first_screen_says_what_is_trained_and_how_well(run: Run) -> None:
    content = content_of(run, decoder)
    about = dict(content["about"])
    assert about["model"] == "quickstart/model · all weights · fp32 · fsdp2"
    assert about["method"] == "grpo · 64 prompts × 8 samples a step · lr 0.0002 · KL 0.001 · synchronous"
    assert about["data"] == "data/train.parquet · evaluated on data/validation.parquet"
    assert (about["rewards"], about["hardware"]) == ("sort_letters", "1 node, CPUs · n2")
    score, reward, time, health = content["cards"]
    assert (score["title"], score["value"], score["note"]) == ("Evaluation score", "0.500", "step 20")
    assert (reward["value"], reward["note"]) == ("1.046", "0.092 at step 1 · 1.046 at best")
    assert time["note"] == "step 20 · 2.00 s each · 160 samples"
    assert (health["value"], health["status"], health["note"]) == (
        "done",
        "bad",
        "1 wrong: length · 1 to look at: waiting",
    )
    report_outcome(run, 2, "failed", "trainer-0: killed", "agent-0")
    open_attempt(run, "1.2", ["n2"])
    report_outcome(run, 3, "failed", "trainer-0: killed", "agent-0")
    health = content_of(run, decoder)["cards"][-1]
    assert (health["value"], health["status"]) == ("failed", "bad")
    assert health["note"].startswith("trainer-0: killed · 1 wrong: length · ")
    assert "attempts" in health["note"]


def test_what_the_nodes_did_adds_up(run: Run) -> None:
    found = content_of(run, no_decoder)["goodput"]
    assert sum(share for _, share, _ in found["uses"]) == pytest.approx(1)
    assert found["queued"] == 30
    assert {name for name, *_ in found["uses"]} == {"training", "generation", "starting", "waiting", "lost", "idle"}


def test_what_is_trained_by_other_methods() -> None:
    lora = {"trainer.policy.model.path": "/models/Qwen/Qwen3-8B", "trainer.policy.model.lora.rank": 16, "trainer.strategy": "megatron",
            "trainer.policy.megatron_config.dtype": "bf16", "slurm.gpus_per_node": "h100:8"}  # fmt: skip
    own = {"trainer.mode": "sft", "trainer.train_batch_size": 32, "trainer.policy.optimizer_config.lr": 1e-5}
    found = dict(about(lora | own, [Attempt(1, "1", ["n1", "n2"], 0.0)], "hpcrl 1.0"))
    assert found == {
        "model": "Qwen/Qwen3-8B · LoRA of rank 16 · bf16 · megatron",
        "method": "supervised fine-tuning · 32 rows a step · lr 1e-05",
        "hardware": "2 nodes, GPUs h100:8 each · n1, n2",
        "code": "hpcrl 1.0",
    }
    rewards = {"environment.reward_function.mine:short": 1.0, "environment.reward_function.gsm8k": 0.5}
    late = {"trainer.fully_async.max_staleness_steps": 2}
    found = dict(about(rewards | late, [], "hpcrl 1.0"))
    assert found["rewards"] == "mine:short, gsm8k"
    compared = rewards | {"environment.group_reward_function.own": 1.0, "environment.group_reward_function.rank": 0.5}
    assert dict(about(compared, [], "hpcrl 1.0"))["rewards"] == "mine:short, gsm8k; of groups: own, rank"
    assert "up to 2 steps stale" in found["method"]


@pytest.mark.parametrize(("noted", "shown"), [("a" * 40, ""), ("a" * 40 + " with changes", " with changes")])
def test_the_code_of_a_run_is_named_by_its_commit(run: Run, noted: str, shown: str) -> None:
    write_text(run.code / "hpcrl" / "__init__.py", '__version__ = "1.0"\n')
    write_text(run.code / "commit.txt", f"{noted}\n")
    (found,) = [
        value for what, value in content_of(run, no_decoder, with_samples=False)["environment"] if what == "code"
    ]
    assert found == f"hpcrl 1.0, commit {'a' * 12}{shown}"


def test_charts_are_named_in_words_and_begin_with_the_reward(run: Run) -> None:
    with MetricsWriter(run, "controller", 3, 20) as writer:
        writer.write(
            20, {EVAL_SCORE: 0.5, "reward/avg_pass_at_8": 0.5, "eval/all/loss": 1.0, "generate/max_num_tokens": 5.0}
        )
    charts = content_of(run, decoder)["charts"]
    assert charts[0] == ("Reward", "Reward", [REWARD, EVAL_SCORE])
    assert charts[1][1] == "Groups with a solved sample (reward ≥ 1, or success)"
    assert ("Evaluation", "Validation loss", ["eval/all/loss"]) in charts
    lengths = ["generate/avg_num_tokens", "generate/max_num_tokens"]
    assert ("Samples", "Tokens per response", lengths) in charts, "the mean comes first"
    assert not any("other/" in name for _, _, names in charts for name in names)


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


def test_each_kind_of_the_timeline_has_a_colour() -> None:
    colours = (ROOT / "hpcrl" / "observe" / "report" / "page" / "elements.js").read_text().partition("KIND_COLOURS")[2]
    assert [kind for kind in KINDS if f" {kind}: " not in colours.partition("};")[0]] == []


def test_a_report_of_a_thousand_steps_is_small(tmp_path: Path) -> None:
    run = made(tmp_path, "thousand", 1000, metrics=100, ranks=8, replicas=8)
    for step in (998, 999, 1000):
        write_step(run, step, [float(at) for at in range(8)], response=5000)
    path = tmp_path / "report.html"
    assert main(["report", str(run.path), "-o", str(path)]) == 0
    assert path.stat().st_size < 10e6
    (content,) = embedded(path)["runs"]
    assert [one["step"] for one in content["samples"]["trained"]] == [998, 999, 1000]
    assert content["samples"]["trained"][0]["groups"][0]["samples"][0]["rows"][0]["left_out"] == 1000


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


ALIKE, ADVANTAGE = "reward/groups_without_spread", "loss/avg_raw_advantages_abs"


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


@pytest.mark.faults_slow
def test_a_live_report_has_few_connections(served: LiveReport) -> None:
    """Whoever else is on the machine opens hundreds, and says nothing: the reader's request is answered after those have timed out."""
    most = 0
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 10))
            most = max(most, sum("process_request_thread" in thread.name for thread in threading.enumerate()))
        assert most <= 32
        assert httpx.get(served.url, trust_env=False, timeout=120).status_code == 200


def drip(connection: socket.socket) -> None:
    """Send a request byte by byte for half a minute, or until the connection ends."""
    with suppress(OSError):
        for _ in range(300):
            connection.sendall(b"G")
            time.sleep(0.1)


def test_a_live_report_ends_who_shows_no_token(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a stranger whose request comes byte by byte; a reader with the token stays."""
    monkeypatch.setattr(live_module, "_STRANGER_S", 0.5)
    live = LiveReport([run], decoder, 0)
    thread = threading.Thread(target=live.serve)
    thread.start()
    try:
        with httpx.Client(trust_env=False, timeout=60) as http:
            assert http.get(live.url).status_code == 200
            with socket.create_connection(("127.0.0.1", live.port), 60) as slow:
                began = time.monotonic()
                threading.Thread(target=drip, args=[slow], daemon=True).start()
                assert slow.recv(1) == b""
                assert time.monotonic() - began < 25
            (connection,) = http._transport._pool.connections  # type: ignore[attr-defined]
            assert connection.is_idle()
            assert http.get(live.url).status_code == 200
            assert [connection] == http._transport._pool.connections  # type: ignore[attr-defined]
    finally:
        live.close()
        thread.join()


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
