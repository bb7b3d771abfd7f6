"""What each role waits for, and the advice: the right setting for each wait, and none that the run has, or that is refused."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.launch.manage.screen import RunView, details
from hpcrl.observe.advice import Advised, advise
from hpcrl.observe.alerts.monitor import AlertMonitor
from hpcrl.observe.live_status import LiveStatusReader
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.report.content import content_of
from hpcrl.observe.timeline import KINDS
from hpcrl.observe.tuning import CALL, COMPUTING, PLACE, QUEUE, TUNINGS
from hpcrl.observe.waiting import Waiting, waiting_of
from hpcrl.rollout.threads import CallThreads
from hpcrl.rundir.alerts import read_alerts
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt
from hpcrl.rundir.records import append_text
from tests.observe.test_report import no_decoder
from tests.paths import CONFIGS, QUICKSTART, ROOT

BATCH = "wait_for_generation_buffer"
Phases = list[tuple[str, float]]
TRAINER: Phases = [(BATCH, 6.0), ("policy_train", 3.0), ("sync_weights", 1.0)]
REPLICA: Phases = [("generate", 6.0), ("idle", 3.5), ("update_weights", 0.5)]
GROUPS_OF_64 = ["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=32", "generator.n_samples_per_prompt=8"]


def write(run: Run, process: str, phases: Phases, steps: int = 10, attempt: int = 1, began: float = 1000.0) -> None:
    """Write the timeline of a process that does the same in each step of ten seconds."""
    at, lines = began, list[str]()
    for step in range(1, steps + 1):
        for phase, seconds in phases:
            own = {"step": step} if process.startswith("rank-") else {}
            lines.append(json.dumps({"start": round(at, 6), "seconds": round(seconds, 6), "phase": phase, **own}))
            at += seconds
    append_text(run.timeline_of(attempt, process), "".join(f"{line}\n" for line in lines))


def made(tmp_path: Path, *overrides: str, executor: str = "slurm", **processes: Phases) -> Run:
    """Return a run of the quickstart with the timelines of rank 0 and of replicas."""
    run = Run(tmp_path / "quickstart" / "one")
    write_text(run.config, Config.from_toml([QUICKSTART], overrides).to_toml())
    write_json(run.submission, {"executor": executor, "job_id": "1", "host": "n1", "overrides": [], "submitted": 1.0})
    open_attempt(run, "1", ["n1"])
    write(run, "rank-0", TRAINER)
    for process, phases in (processes or {"rollout_0": REPLICA}).items():
        write(run, process.replace("_", "-"), phases)
    return run


def waits(found: Waiting | None) -> dict[tuple[str, str], float]:
    assert found
    return {(wait.role, wait.what): round(wait.share, 6) for wait in found.waits}


def proposed(run: Run) -> dict[str, object]:
    """Return the advised values by setting."""
    advised = advise(run)
    assert advised
    return {path: value for one in advised.advice for path, value in one.overrides.items()}


def test_each_role_waits_for_what_the_other_does(tmp_path: Path) -> None:
    found = waiting_of(made(tmp_path), colocated=False)
    assert waits(found) == {
        ("trainer", "samples"): 0.6,
        ("trainer", "weights"): 0.1,
        ("engines", "training"): 0.3,
        ("engines", "weights"): 0.05,
        ("engines", "weights to load"): 0.05,
    }
    assert found
    assert (found.first, found.last, found.seconds) == (2, 9, 80.0)


def test_a_batch_may_wait_for_environments_evaluation_or_the_slowest_replica(tmp_path: Path) -> None:
    run = made(
        tmp_path,
        rollout_0=[("evaluate", 1.0), ("generate", 2.0), ("environment", 3.0), ("idle", 4.0)],
        rollout_1=[("evaluate", 1.0), ("generate", 1.0), ("idle", 8.0)],
    )
    assert waits(waiting_of(run, colocated=False)) == {
        ("trainer", "evaluation"): 0.1,
        ("trainer", "samples"): 0.2,
        ("trainer", "environments"): 0.3,
        ("trainer", "weights"): 0.1,
        ("engines", "environments"): 0.15,
        ("engines", "the slowest samples"): 0.2,
        ("engines", "training"): 0.3,
        ("engines", "weights"): 0.1,
    }


def test_scorers_are_no_engines(tmp_path: Path) -> None:
    """The trainer waits for them; how long they are idle says nothing of the replicas."""
    scorer: Phases = [("idle", 5.0), ("score", 1.0), ("idle", 4.0)]
    trainer = {("trainer", "samples"): 0.5, ("trainer", "scores"): 0.1, ("trainer", "weights"): 0.1}
    run = made(tmp_path / "one", rollout_0=[("generate", 5.0), ("idle", 5.0)], scorer_0=scorer, scorer_1=scorer)
    found = waits(waiting_of(run, colocated=False))
    assert found == trainer | {
        ("engines", "the slowest samples"): 0.1,
        ("engines", "training"): 0.3,
        ("engines", "weights"): 0.1,
    }
    assert waits(waiting_of(made(tmp_path / "two", scorer_0=scorer, scorer_1=scorer), colocated=False)) == trainer


def test_rounded_times_leave_no_span_out(tmp_path: Path) -> None:
    """Each start and each length is rounded by itself, so that a span may end after the next one begins."""
    run = made(tmp_path)
    open_attempt(run, "2", ["n1"])
    for process, phases in (("rank-0", TRAINER), ("rollout-0", [REPLICA[0], ("fetch_weights", 0.0), *REPLICA[1:]])):
        write(
            run,
            process,
            [(phase, seconds and seconds + 6e-7) for phase, seconds in phases],
            attempt=2,
            began=1763666666.1,
        )
    assert waits(waiting_of(run, colocated=False)) == pytest.approx(
        {
            ("trainer", "samples"): 0.6,
            ("trainer", "weights"): 0.1,
            ("engines", "training"): 0.3,
            ("engines", "weights"): 0.05,
            ("engines", "weights to load"): 0.05,
        },
        abs=1e-5,
    )


def test_gpus_that_are_shared_wait_where_neither_computes(tmp_path: Path) -> None:
    run = made(tmp_path, rollout_0=[("update_weights", 1.0), ("generate", 4.0), ("environment", 1.0), ("asleep", 4.0)])
    write(run, "rank-0", [(BATCH, 6.0), ("onload", 1.0), ("policy_train", 2.0), ("offload", 1.0)], attempt=2)
    write(
        run, "rollout-0", [("update_weights", 1.0), ("generate", 4.0), ("environment", 1.0), ("asleep", 4.0)], attempt=2
    )
    open_attempt(run, "2", ["n1"])
    found = waits(waiting_of(run, colocated=True))
    assert found == {("GPUs", "changes of turns"): 0.3, ("GPUs", "environments"): 0.1}


def test_a_run_that_has_hardly_begun_has_no_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path)
    open_attempt(run, "2", ["n1"])
    write(run, "rank-0", TRAINER, steps=4, attempt=2)
    assert waiting_of(run, colocated=False) is None
    assert main(["advise", str(run.path)]) == 5
    assert "too few steps" in capsys.readouterr().err


def test_only_the_newest_steps_count(tmp_path: Path) -> None:
    run = made(tmp_path)
    open_attempt(run, "2", ["n1"])
    at, lines = 0.0, list[str]()
    for step in range(1, 61):
        busy = 9.0 if step > 35 else 1.0
        for phase, seconds in ((BATCH, 10 - busy), ("policy_train", busy)):
            lines.append(json.dumps({"start": at, "seconds": seconds, "phase": phase, "step": step}) + "\n")
            at += seconds
    append_text(run.timeline_of(2, "rank-0"), "".join(lines))
    found = waiting_of(run, colocated=False)
    assert found
    assert (found.first, found.last) == (40, 59)
    assert waits(found) == {("trainer", "samples"): 0.1}


def test_more_replicas_or_older_policies_where_the_trainer_waits(tmp_path: Path) -> None:
    run = made(tmp_path)
    assert proposed(run) == {
        "generator.inference_engine.num_engines": 2,
        "trainer.fully_async.max_staleness_steps": 1,
    }
    advised = advise(run)
    assert advised
    assert next(advised.lines()) == (
        "trainer waits 60% for samples (steps 2 to 9): generator.inference_engine.num_engines=2 (now 1), at best 1.4 times as fast; or "
        "trainer.fully_async.max_staleness_steps=1 (now 0), at best 1.4 times as fast"
    )


def test_lent_gpus_where_engines_have_no_room_for_all_groups(tmp_path: Path) -> None:
    """The quickstart has 64 groups in a step, one engine, and one GPU to lend."""
    run = made(tmp_path, "trainer.placement.lend=false")
    with MetricsWriter(run, "rollout-0", 1, 0) as writer:
        for step in range(2, 10):
            writer.write(step, {"generate/groups_at_once": 63.0})
    assert proposed(run)["trainer.placement.lend"] is True
    with MetricsWriter(run, "rollout-0", 1, 9) as writer:
        for step in range(10, 30):
            writer.write(step, {"generate/groups_at_once": 64.0})
    assert "trainer.placement.lend" not in proposed(run)


def test_what_lent_engines_wait_for_is_no_wait(tmp_path: Path) -> None:
    lent: Phases = [("generate", 5.0), ("asleep", 4.0), ("idle", 1.0)]
    run = made(tmp_path, "trainer.placement.lend=true", rollout_0=REPLICA, rollout_1=lent)
    advised = advise(run)
    assert advised
    assert waits(advised.waiting) == waits(waiting_of(made(tmp_path / "apart"), colocated=False))


def test_replicas_that_keep_the_trainer_busy_where_they_are_ahead(tmp_path: Path) -> None:
    busy: Phases = [("generate", 9.5), ("update_weights", 0.5)]
    run = made(tmp_path, "trainer.fully_async.max_staleness_steps=1", rollout_0=busy)
    assert proposed(run) == {"generator.inference_engine.num_engines": 3}


def test_no_advice_that_the_configuration_refuses_or_the_run_has(tmp_path: Path) -> None:
    few = "trainer.fully_async.num_parallel_generation_workers=64"
    remote = 'generator.inference_engine.remote_urls=["https://a:1"]'
    assert "trainer.fully_async.max_staleness_steps" not in proposed(
        made(tmp_path / "one", "trainer.fully_async.max_staleness_steps=4")
    )
    assert proposed(made(tmp_path / "local", executor="local")) == {"trainer.fully_async.max_staleness_steps": 1}
    assert proposed(made(tmp_path / "few", few))["trainer.fully_async.max_staleness_steps"] == 1
    elsewhere = made(tmp_path / "remote", "generator.inference_engine.backend=vllm", remote)
    assert "generator.inference_engine.num_engines" not in proposed(elsewhere)


def test_nothing_is_advised_where_nothing_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path, rollout_0=[("generate", 10.0)])
    open_attempt(run, "2", ["n1"])
    write(run, "rank-0", [(BATCH, 0.5), ("policy_train", 9.5)], attempt=2)
    write(run, "rollout-0", [("generate", 9.5), ("idle", 0.5)], attempt=2)
    assert proposed(run) == {}
    assert main(["advise", str(run.path)]) == 0
    assert capsys.readouterr().out == "no role waits for a tenth of its time (steps 2 to 9)\n"


SAVES: Phases = [(BATCH, 1.0), ("policy_train", 5.0), ("save_checkpoints", 4.0)]
EVALUATES: Phases = [(BATCH, 4.0), ("policy_train", 6.0)]


@pytest.mark.parametrize(
    ("trainer", "replica", "overrides", "expected"),
    [
        (SAVES, [("generate", 4.0), ("idle", 6.0)], ["trainer.ckpt_mode=sync"], {"trainer.ckpt_mode": "async"}),
        (SAVES, [("generate", 4.0), ("idle", 6.0)], ["trainer.ckpt_interval=1"], {"trainer.ckpt_interval": 13}),
        (EVALUATES, [("evaluate", 4.0), ("generate", 6.0)], ["trainer.eval_interval=1"], {"trainer.eval_interval": 13}),
        ([(BATCH, 0.5), ("policy_train", 9.5)], [("generate", 7.0), ("update_weights", 3.0)],
         ["trainer.fully_async.max_staleness_steps=1"], {"trainer.fully_async.sync_weight_interval": 2}),
        ([(BATCH, 0.5), ("policy_train", 9.5)], [("generate", 7.0), ("fetch_weights", 3.0)],
         ["generator.inference_engine.weight_copy_dir=/tmp"], {"generator.inference_engine.full_weights_interval": 10}),
        ([(BATCH, 0.5), ("policy_train", 9.5)], [("generate", 2.0), ("idle", 8.0)],
         ["generator.inference_engine.num_engines=4", "slurm.gpus_per_node=8"], {"generator.inference_engine.num_engines": 1}),
    ],
)  # fmt: skip
def test_the_setting_for_each_wait(
    tmp_path: Path, trainer: Phases, replica: Phases, overrides: list[str], expected: dict[str, object]
) -> None:
    run = made(tmp_path, *overrides)
    open_attempt(run, "2", ["n1"])
    write(run, "rank-0", trainer, attempt=2)
    write(run, "rollout-0", replica, attempt=2)
    assert proposed(run).items() >= expected.items()
    refused = {
        path for path in expected if not Config.from_toml([run.config]).with_overrides(f"{path}={expected[path]}")
    }
    assert not refused


@pytest.mark.parametrize(("evaluates", "pays"), [(0.0, False), (9.0, True)])
def test_replicas_that_only_evaluate_pay_where_they_do(tmp_path: Path, evaluates: float, pays: bool) -> None:
    own = ["slurm.eval_replicas=1", "generator.inference_engine.num_engines=2", "trainer.eval_interval=5"]
    run = made(tmp_path, *own)
    open_attempt(run, "2", ["n1"])
    write(run, "rank-0", [(BATCH, 6.0), ("policy_train", 4.0)], attempt=2)
    write(run, "rollout-0", [("generate", 6.0), ("idle", 4.0)], attempt=2)
    write(run, "rollout-1", [("evaluate", evaluates), ("idle", 10.0 - evaluates)], attempt=2)
    assert ("slurm.eval_replicas" in proposed(run)) != pays
    advised = advise(run)
    assert advised
    found = [one.at_best for one in advised.advice if "slurm.eval_replicas" in one.overrides]
    assert found == ([] if pays else [pytest.approx(1 / 0.7)]), "twice as many generate"


@pytest.mark.parametrize(
    ("seconds", "gain"), [(0.8, ", at best 1.03 times as fast"), (0.6, None), (4.0, ", at best 1.5 times as fast")]
)
def test_a_small_gain_is_no_saving_of_gpus(tmp_path: Path, seconds: float, gain: str | None) -> None:
    run = made(tmp_path, "trainer.ckpt_interval=1")
    open_attempt(run, "2", ["n1"])
    write(run, "rank-0", [("policy_train", 10 - seconds), ("save_checkpoints", seconds)], attempt=2)
    write(run, "rollout-0", [("generate", 5.0), ("idle", 5.0)], attempt=2)
    advised = advise(run)
    assert advised
    assert [str(one).partition(")")[2] for one in advised.advice] == ([gain] if gain else [])


@pytest.mark.parametrize(
    ("trainer", "replica", "overrides", "at_best"),
    [
        ([("policy_train", 10.0)], [("generate", 8.0), ("idle", 2.0)],
         ["slurm.gpus_per_node=1", "trainer.policy.compile_model=false"], 1.25),
        ([("policy_train", 10.0)], [("generate", 2.0), ("idle", 8.0)],
         ["slurm.gpus_per_node=1", "trainer.policy.compile_model=false"], 1.9),
        ([("policy_train", 10.0)], [("generate", 7.0), ("fetch_weights", 3.0)],
         ["generator.inference_engine.weight_copy_dir=/tmp"], None),
        ([(BATCH, 0.9), ("policy_train", 9.1)], [("generate", 7.0), ("fetch_weights", 3.0)],
         ["generator.inference_engine.weight_copy_dir=/tmp"], 1 / 0.91),
        ([("policy_train", 10.0)], [("generate", 7.0), ("update_weights", 3.0)], ["trainer.fully_async.max_staleness_steps=1"], None),
        (SAVES, [("generate", 10.0)], ["trainer.ckpt_mode=sync"], None),
        ([("policy_train", 6.0), ("save_hf_model", 4.0)], [("generate", 10.0)], ["trainer.hf_save_interval=1"], None),
    ],
    ids=["training", "training far behind", "fetching, trainer busy", "fetching", "loading, trainer busy", "saving", "exporting"],
)  # fmt: skip
def test_a_step_becomes_no_shorter_than_what_the_other_role_has_to_do(
    tmp_path: Path, trainer: Phases, replica: Phases, overrides: list[str], at_best: float | None
) -> None:
    run = made(tmp_path, *overrides)
    open_attempt(run, "2", ["n1"])
    write(run, "rank-0", trainer, attempt=2)
    write(run, "rollout-0", replica, attempt=2)
    advised = advise(run)
    assert advised
    found = [one.at_best for one in advised.advice if not one.fewer_gpus]
    assert found == ([pytest.approx(at_best)] if at_best else [])


def test_a_run_without_engines_saves_time_by_fewer_checkpoints(tmp_path: Path) -> None:
    """Nobody works beside its trainer."""
    run = Run(tmp_path / "sft" / "one")
    write_text(
        run.config, Config.from_toml([CONFIGS / "sft_tiny.toml"]).with_overrides(["trainer.ckpt_mode=sync"]).to_toml()
    )
    open_attempt(run, "1", ["n1"])
    write(run, "rank-0", SAVES)
    assert proposed(run) == {"trainer.ckpt_mode": "async"}


def test_a_run_without_engines_that_waits_for_rows_needs_no_engines(tmp_path: Path) -> None:
    run = made(tmp_path)
    write_text(run.config, Config.from_toml([CONFIGS / "sft_tiny.toml"]).to_toml())
    assert proposed(run) == {}


@pytest.mark.parametrize(
    ("call", "queue", "computing", "advised"),
    [(0.1, 0.7, 0.01, True), (0.1, 0.7, 0.9, False), (4e-5, 0.01, 0.2, False), (0.1, 0.0, 0.01, False)],
    ids=["they wait for a service", "they compute", "they are quick", "no thread is lacking"],
)
def test_more_threads_only_for_environments_that_wait(
    tmp_path: Path, call: float, queue: float, computing: float, *, advised: bool
) -> None:
    run = made(tmp_path, *GROUPS_OF_64, rollout_0=[("generate", 3.0), ("environment", 3.0), ("idle", 4.0)])
    with MetricsWriter(run, "rollout-0", 1, 0) as writer:
        for step in range(1, 10):
            writer.write(step, {CALL: call, QUEUE: queue, COMPUTING: computing})
    assert proposed(run).get("environment.skyrl_gym.max_env_workers") == (256 if advised else None)


@pytest.mark.parametrize(("place", "more"), [(8.0, 12), (0.5, None)], ids=["they wait for a place", "there are enough"])
def test_more_sandboxes_where_samples_wait_for_one(tmp_path: Path, place: float, more: int | None) -> None:
    sandboxes = ["environment.env_class=sandbox", "slurm.sandboxes.nodes=3", "slurm.sandboxes.per_node=16"]
    replica = [("generate", 3.0), ("environment", 5.0), ("idle", 2.0)]
    run = made(tmp_path, *GROUPS_OF_64, *sandboxes, rollout_0=replica)
    with MetricsWriter(run, "rollout-0", 1, 0) as writer:
        writer.write(9, {CALL: 1.0, QUEUE: 0.0, PLACE: place, COMPUTING: 0.1})
    assert proposed(run).get("slurm.sandboxes.nodes") == more


def test_environments_open_quickly_and_step_slowly(tmp_path: Path) -> None:
    """Both are calls of the same threads."""

    async def times() -> dict[str, float]:
        threads = CallThreads(1, 300.0)
        calls = [threads.call(partial(time.sleep, seconds)) for seconds in [0.0] * 8 + [0.02] * 8]
        for call in calls:
            await call.result()
        return threads.take_metrics()

    run = made(tmp_path, *GROUPS_OF_64, rollout_0=[("generate", 3.0), ("environment", 3.0), ("idle", 4.0)])
    with MetricsWriter(run, "rollout-0", 1, 0) as writer:
        writer.write(9, asyncio.run(times()))
    assert proposed(run)["environment.skyrl_gym.max_env_workers"] == 256


def test_what_another_run_only_may_have_is_marked(tmp_path: Path) -> None:
    run = made(tmp_path, "generator.inference_engine.num_engines=1", "slurm.gpus_per_node=8")
    open_attempt(run, "2", ["n1"])
    write(run, "rank-0", [(BATCH, 0.5), ("policy_train", 9.5)], attempt=2)
    write(run, "rollout-0", [("generate", 2.0), ("idle", 8.0)], attempt=2)
    advised = advise(run)
    assert advised
    (one,) = advised.advice
    assert one.overrides == {"trainer.placement.colocate_all": True}
    assert "as fast on fewer GPUs" in str(one)


def test_advice_as_json_in_the_status_and_in_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path)
    advised = advise(run)
    assert isinstance(advised, Advised)
    line, *_ = advised.lines()
    assert main(["advise", "--json", str(run.path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["waits"][0] == {"role": "trainer", "what": "samples", "share": pytest.approx(0.6)}
    assert printed["advice"][0]["overrides"] == {"generator.inference_engine.num_engines": 2}
    view = RunView(run, live=LiveStatusReader(run).read())
    assert ("waiting", line) in details(view)
    found = content_of(run, no_decoder, with_samples=False)["findings"]
    assert {"name": "waiting", "status": "look", "text": line} in found
    assert main(["status", "--json", str(run.path)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["waiting"]["first"] == 2


def test_an_alert_of_a_wait_has_the_advice(tmp_path: Path) -> None:
    run = made(tmp_path, "trainer.alerts.rules.slow={kind='wait_above', value=0.5, steps=2}")
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        for step in (1, 2):
            writer.write(step, {"timing/step": 10.0, "throughput/wait_share": 0.6})
    AlertMonitor(run, 1, Config.from_toml([run.config]).trainer).poll()
    (alert,) = [one for one in read_alerts(run) if one.name == "slow"]
    assert alert.begin.text.startswith(
        "throughput/wait_share is 0.6, above 0.5, 2 times in a row; trainer waits 60% for"
    )
    assert "generator.inference_engine.num_engines=2" in alert.begin.text


def test_each_tuning_is_a_row_of_the_documentation() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page.partition("| set | where | gain |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [f"| {one.name} | {one.where} | {one.gain} |" for one in TUNINGS]


def test_a_report_has_a_colour_for_each_kind_of_phase() -> None:
    script = (ROOT / "hpcrl" / "observe" / "report" / "page" / "elements.js").read_text()
    colours = script.partition("KIND_COLOURS = {")[2].partition("}")[0]
    assert [kind for kind in KINDS if f"{kind}: " not in colours] == []
