"""The worker's loop against a controller over HTTP and a real engine; the job as a process, and its ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from hpcrl.config import Config, EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.cache_files import read_rows
from hpcrl.data.group_file import read_truth
from hpcrl.data.tokenizer import decoder, load_tokenizer
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server
from hpcrl.errors import CommitError, ConfigError, EngineError, HpcrlError
from hpcrl.observe.metrics import merged
from hpcrl.rollout.generate import conversations
from hpcrl.rollout.worker import WorkerOptions, run_worker
from hpcrl.rundir.commit import COMMIT, MANIFEST, write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter, read_process_statuses
from hpcrl.runtime.token import bearer
from hpcrl.types import GroupMeta, Kind, Prompt, Work
from tests.paths import ROOT
from tests.rollout import material
from tests.rollout.conftest import WithEngine
from tests.rollout.controller import FakeController
from tests.rollout.environments import Stuck
from tests.rollout.material import (
    QUICKSTART,
    RUN_NAME,
    START_S,
    TOKEN,
    children_of,
    handed_over,
    logprobs,
    probe_of,
    processes,
    rows_of,
    wait_for,
)

LENGTH = 40
TOKENIZER = load_tokenizer(Pretrained(str(QUICKSTART)), ChatTemplateConfig())
GENERATOR = GeneratorConfig(sampling_params=SamplingParams(max_generate_length=LENGTH))
ATTEMPT = 2
END_S = 120.0  # of a job that gives its engine 5 s and then ends it, while other tests have the cores: 30 s were too few once


def item(name: str, kind: Kind = "train", n_samples: int = 4, env_class: str = "sort_letters") -> Work:
    extras = {"reward_spec": {"ground_truth": "abc"}}
    prompt = Prompt(name, [{"role": "user", "content": "sort: bca"}], env_class, extras, "letters")
    return Work(name, kind, prompt, n_samples, seed=sum(map(ord, name)))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / RUN_NAME)
    write_text(run.token, TOKEN + "\n", mode=0o600)
    return run


@pytest.fixture
def controller(run: Run) -> Iterator[FakeController]:
    with FakeController().served(run, ATTEMPT) as controller:
        yield controller


def publish(run: Run, version: int, model: Path) -> Path:
    return material.publish(model, run.weights_of(version), version, ATTEMPT, probe=probe_of(model)).path


def start(
    run: Run,
    server: Server,
    with_engine: WithEngine[Any],
    capacity: int = 4,
    *,
    from_model: bool = True,
    shares_gpus: bool = False,
) -> tuple[threading.Thread, list[BaseException]]:
    """Run the worker in a thread; the list receives the error that ends it."""

    async def nothing(_engine: EngineClient) -> None: ...

    with_engine(nothing)  # version 0 again
    options = WorkerOptions(
        run, ATTEMPT, 5, capacity, n_samples=4, dump_evals=True, engine_dtype="float32", from_model=from_model, shares_gpus=shares_gpus,
    )  # fmt: skip
    status, failed = StatusWriter(run, "rollout-5", ATTEMPT), list[BaseException]()

    def main() -> None:
        try:
            maker = conversations(TOKENIZER, GENERATOR, EnvironmentConfig(), replica=5)
            asyncio.run(run_worker(options, server, maker, decoder(TOKENIZER), status))
        except HpcrlError as error:
            failed.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    return thread, failed


def assert_said_by(model: Path, run: Run, meta: GroupMeta) -> None:
    samples = rows_of(run, meta)
    assert len(samples) == 4
    for sample in samples:
        chosen = sample.loss_mask > 0
        expected = logprobs(model, sample.token_ids[~chosen].tolist(), sample.token_ids[chosen].tolist())
        torch.testing.assert_close(sample.rollout_logprobs[chosen], expected, atol=1e-3, rtol=0)


def test_groups_of_each_version(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any], models: list[Path]
) -> None:
    asked = replace(item("e2", "eval", 2), asked="what e2 is")
    controller.work.extend([item("g1"), item("g2"), item("e1", "eval", 1), asked, item("g3"), item("g4")])
    thread, failed = start(run, server, with_engine)
    try:
        wait_for(lambda: len(controller.completed) == 6, 60, f"only {controller.completed}, {failed}")
        publish(run, 1, models[1])
        controller.version = 1
        wait_for(lambda: controller.claims and controller.claims[-1]["version"] == 1, 30, f"still version 0, {failed}")
        controller.work.extend([item("g5"), replace(item("e3", "eval"), asked="what e3 is")])
        wait_for(lambda: len(controller.completed) == 8, 30, f"no g5, {failed}")
    finally:
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    assert not thread.is_alive()
    assert all(claim["capacity"] <= 4 and claim["worker"] == "rollout-5" for claim in controller.claims)

    by_name = {meta.group_id: meta for meta in controller.completed}
    for name in ("g1", "g2", "g3", "g4", "g5"):
        meta, version = by_name[name], int(name == "g5")
        assert (meta.oldest_version, meta.newest_version) == (version, version)
        assert_said_by(models[version], run, meta)

    lines = [json.loads(line) for line in run.eval_dump(0, 5).read_text().splitlines()]
    assert sorted((line["group_id"], line["sample"]) for line in lines) == [("e1", 0), ("e2", 0), ("e2", 1)]
    assert set(lines[0]) == {
        "prompt", "ground_truth", "response", "score", "stop_reason", "env_class", "data_source", "group_id", "sample", "env_metrics", "parts",
    }  # fmt: skip
    assert [part["by"] for part in lines[0]["parts"]] == ["prompt", "policy"]

    assert handed_over(run, 5) == {"g1", "g2", "g3", "g4", "g5"}

    weights = PublishedWeights.read(run.weights_of(1)).digest
    kept = [row for version in (0, 1) for row in read_rows(run.eval_rows(version, 5))[0]]
    assert [(row.asked, row.weights, row.group) for row in kept] == [
        ("what e2 is", "", by_name["e2"]), ("what e3 is", weights, by_name["e3"]),
    ], "what nobody would ask for again is not kept"  # fmt: skip

    metrics = merged(run)
    assert 0 < metrics[1]["weights/pause_seconds/rollout-5"] < 5
    assert metrics[1]["weights/fetch_seconds/rollout-5"] > 0
    assert metrics[0]["generate/tokens_per_second/rollout-5"] > 0
    assert 0 < metrics[1]["weights/load_seconds/rollout-5"] < metrics[1]["weights/pause_seconds/rollout-5"]
    size = sum(path.stat().st_size for path in run.weights_of(1).iterdir() if path.name not in (MANIFEST, COMMIT))
    assert metrics[1]["weights/load_gib/rollout-5"] == pytest.approx(size / 2**30)
    assert read_truth(run.inside(by_name["g1"].path), by_name["g1"]) == "abc"
    samples = sum(path.stat().st_size for path in run.samples_of(5).iterdir())
    written = sum(values.get("throughput/samples_gib/rollout-5", 0.0) for values in metrics.values())
    assert metrics[0]["memory/host_gib/rollout-5"] > written == pytest.approx(samples / 2**30)
    assert 0 < metrics[1]["weights/probe_difference/rollout-5"] < 1e-4
    (process_status,) = [one for one in read_process_statuses(run, ATTEMPT) if one.process == "rollout-5"]
    assert process_status.facts["version"] in (0, 1)


def test_a_first_version_that_is_published_comes_before_all_work(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any], models: list[Path]
) -> None:
    publish(run, 0, models[1])
    controller.work.append(item("g1"))
    thread, failed = start(run, server, with_engine, from_model=False)
    try:
        wait_for(lambda: len(controller.completed) == 1, 60, f"no g1, {failed}")
    finally:
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    assert_said_by(models[1], run, controller.completed[0])


def test_work_that_comes_with_news_of_a_newer_version_is_done(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any], models: list[Path]
) -> None:
    publish(run, 1, models[1])
    controller.work.extend(item(f"g{i}", n_samples=16) for i in range(4))
    controller.version = 1  # named by the same answer that hands out the work
    thread, failed = start(run, server, with_engine)
    try:
        wait_for(lambda: len(controller.completed) == 4, 60, f"only {controller.completed}, {failed}")
        wait_for(lambda: controller.claims and controller.claims[-1]["version"] == 1, 30, f"still version 0, {failed}")
    finally:
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    assert all(0 <= meta.oldest_version <= meta.newest_version <= 1 for meta in controller.completed)
    for meta in controller.completed:
        versions = {v for sample in rows_of(run, meta) for v in sample.versions.tolist()} - {-1}
        assert (min(versions), max(versions)) == (meta.oldest_version, meta.newest_version)


def test_a_group_in_flight_that_is_given_again_is_generated_once(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any]
) -> None:
    controller.work.append(item("g1"))
    controller.again.extend([item("g1"), item("g2")])
    thread, failed = start(run, server, with_engine)
    try:
        wait_for(
            lambda: len(controller.completed) >= 2 and controller.claims[-1]["holding"] == [],
            60,
            f"only {controller.completed}, {failed}",
        )
    finally:
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    assert sorted(meta.group_id for meta in controller.completed) == ["g1", "g2"]


def test_a_group_that_nobody_waits_for_is_given_up(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any]
) -> None:
    """The engine forgets it too: there is room for another one."""
    Stuck.go.clear()
    controller.work.extend([item("g1", env_class="tests.rollout.environments:Stuck"), item("g2")])
    thread, failed = start(run, server, with_engine, capacity=2)
    try:
        wait_for(lambda: len(controller.completed) == 1, 60, f"no g2, {failed}")
        wait_for(lambda: controller.claims[-1]["holding"] == ["g1"], 30, "it does not say that it holds g1")
        controller.unwanted = ["g1"]
        controller.work.extend([item("g3"), item("g4")])
        wait_for(lambda: len(controller.completed) == 3, 60, f"only {controller.completed}, {failed}")
        wait_for(lambda: controller.claims[-1]["holding"] == [], 30, "it still holds g1")
        assert controller.claims[-1]["capacity"] == 2
    finally:
        Stuck.go.set()
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    assert sorted(meta.group_id for meta in controller.completed) == ["g2", "g3", "g4"]
    assert handed_over(run, 5) == {"g2", "g3", "g4"}


@pytest.mark.parametrize("waits", ["Stuck", "StuckAtFirst"])
def test_environments_that_take_long_hold_no_place_in_the_engine_and_no_weights(
    waits: str,
    run: Run,
    controller: FakeController,
    server: Server,
    with_engine: WithEngine[Any],
    models: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another group is generated meanwhile, and newer weights are loaded; the score, or the beginning, comes when it does."""
    monkeypatch.setattr("hpcrl.rollout.generation_cache.IDLE_S", 0.2)
    Stuck.go.clear()
    controller.work.extend([item("g1", env_class=f"tests.rollout.environments:{waits}"), item("g2")])
    thread, failed = start(run, server, with_engine, capacity=1)
    try:
        wait_for(lambda: len(controller.completed) == 1, 60, f"no g2, {failed}")
        publish(run, 1, models[1])
        controller.version = 1
        wait_for(lambda: controller.claims[-1]["version"] == 1, 60, f"still version 0, {failed}")
        assert controller.claims[-1]["holding"] == ["g1"]
        Stuck.go.set()
        wait_for(lambda: len(controller.completed) == 2, 60, f"no g1, {failed}")
    finally:
        Stuck.go.set()
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    assert [(meta.group_id, meta.newest_version) for meta in controller.completed] == [
        ("g2", 0),
        ("g1", int(waits == "StuckAtFirst")),
    ]


@pytest.mark.parametrize(("claim_takes", "complete_takes"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_evaluation_is_not_interrupted_by_new_weights(
    run: Run,
    controller: FakeController,
    server: Server,
    with_engine: WithEngine[Any],
    models: list[Path],
    claim_takes: float,
    complete_takes: float,
) -> None:
    """Also where news of them comes before the claim's answer, and where the last groups end while the first are handed over."""
    publish(run, 1, models[1])
    controller.claim_takes, controller.complete_takes = claim_takes, complete_takes
    controller.work.extend(item(f"e{i}", "eval", 1) for i in range(3))
    controller.version = 1
    thread, failed = start(run, server, with_engine)
    try:
        wait_for(lambda: controller.claims and controller.claims[-1]["version"] == 1, 30, f"still version 0, {failed}")
        assert len(controller.completed) == 3, "it takes in new weights before it has handed over"
    finally:
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    for line in run.eval_dump(0, 5).read_text().splitlines():
        assert json.loads(line)["group_id"] in ("e0", "e1", "e2")
    assert len(controller.claims) < 10, "it asks again and again while it waits"


def test_damaged_weights_end_the_worker_before_the_pause(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any], models: list[Path]
) -> None:
    file = publish(run, 1, models[1]) / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    thread, failed = start(run, server, with_engine)
    controller.version = 1
    thread.join(30)
    assert isinstance(failed[0], CommitError)
    assert "v000001" in str(failed[0])
    transport = httpx.HTTPTransport(uds=str(server.socket))
    with httpx.Client(transport=transport, base_url="http://engine", headers=bearer(TOKEN, RUN_NAME)) as http:
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert http.get("/weight_info").json() == {"weight_version": "0"}


def test_a_worker_that_is_to_go_back_to_the_model_ends_at_once(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any], models: list[Path]
) -> None:
    """An engine holds it when it starts, and has no weights of it to load."""
    publish(run, 1, models[1])
    controller.version = 1
    thread, failed = start(run, server, with_engine)
    wait_for(lambda: controller.claims and controller.claims[-1]["version"] == 1, 60, f"still version 0, {failed}")
    controller.version = 0
    thread.join(50)  # less than weights that do not appear are waited for
    assert isinstance(failed[0], EngineError)
    assert "the engine starts again" in str(failed[0])


def test_an_environment_that_is_not_there_ends_the_worker(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any]
) -> None:
    controller.work.append(item("g8", env_class="tests.rollout.environments:Nothing"))
    thread, failed = start(run, server, with_engine)
    thread.join(30)
    assert isinstance(failed[0], ConfigError), "every replica would fail alike"
    assert "g8" in str(failed[0])


def test_an_environment_that_raises_costs_its_samples(
    run: Run, controller: FakeController, server: Server, with_engine: WithEngine[Any]
) -> None:
    raises = "tests.rollout.environments:Raises"
    evaluated = replace(item("e1", "eval", 1, raises), asked="what e1 is")
    controller.work.extend([item("g8", env_class=raises), evaluated])
    thread, failed = start(run, server, with_engine)
    try:
        wait_for(lambda: len(controller.completed) == 2, 60, f"only {controller.completed}, {failed}")
    finally:
        controller.stop = "finished"
        thread.join(30)
    assert not failed
    for meta in controller.completed:
        assert set(meta.stop_reasons) == {"failed"}
        assert "ZeroDivisionError" in meta.failures[0]
    assert not run.eval_rows(0, 5).exists(), "the next attempt tries it once more"


class Job:
    """jobs/rollout.py as a process."""

    def __init__(self, run: Run, model: Path, temporary: Path, stall_s: int) -> None:
        config = {
            "data": {"train_data": ["none.parquet"]},
            "trainer": {"policy": {"model": {"path": str(model)}}, "eval_interval": 0, "max_prompt_length": 16},
            "generator": {
                "sampling_params": {"max_generate_length": LENGTH},
                "inference_engine": {
                    "model_dtype": "float32",
                    "max_num_seqs": 64,
                    "stall_timeout_seconds": stall_s,
                    "weight_copy_dir": "$TMPDIR",
                },
            },
        }
        write_text(run.config, Config.from_dict(config).to_toml())
        self.temporary = temporary
        environment = {**os.environ, "HPCRL_ATTEMPT": str(ATTEMPT), "HPCRL_REPLICA": "5", "TMPDIR": str(temporary)}
        self.log = run.log(ATTEMPT, "rollout-5")
        self.log.parent.mkdir(parents=True)
        with self.log.open("wb") as log:
            command = [sys.executable, str(ROOT / "jobs" / "rollout.py"), str(run.path)]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def engine(self) -> list[int]:
        """Return the processes that have this job's scratch directory in their environment."""

        def mine(pid: int, _fields: list[str]) -> bool:
            try:
                return f"{self.temporary}/hpcrl-".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                return False

        return processes(mine)


@pytest.fixture
def job(request: pytest.FixtureRequest, run: Run, models: list[Path], short_path: Path) -> Iterator[Job]:
    """A job whose engine may be slow, as on a busy machine; a test of a hang gives it seconds."""
    job = Job(run, models[0], short_path, getattr(request, "param", 300))
    try:
        yield job
    finally:
        job.process.kill()
        job.process.wait()


def server_of(job: Job) -> int:
    """Return the process of vLLM's server; another child renders chat templates."""
    children = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in children_of(job.process.pid)]
    (server,) = [pid for pid, command in children if b"engines.vllm.main" in command]
    return server


@pytest.mark.faults_slow
def test_a_job_works_and_ends_on_sigterm_though_its_engine_hangs(
    run: Run, job: Job, controller: FakeController, models: list[Path]
) -> None:
    controller.work.append(item("g1", env_class="tests.rollout.environments:LeavesFiles"))
    wait_for(lambda: controller.completed or job.process.poll() is not None, START_S, "no group")
    assert controller.completed, job.log.read_text()
    assert any(
        "ready" in process_status["state"] or "generating" in process_status["state"]
        for process_status in controller.reports
    )
    assert run.inside(controller.completed[0].path).is_file()
    publish(run, 1, models[1])
    controller.version = 1
    wait_for(lambda: controller.claims[-1]["version"] == 1, END_S, f"still version 0: {job.log.read_text()}")
    (copy,) = job.temporary.glob("hpcrl-weights-*/v000001-*/files")
    assert PublishedWeights.read(copy).version == 1
    assert "libtorch" not in Path(f"/proc/{job.process.pid}/maps").read_text(), "the engine's process has it"
    server = server_of(job)
    (core,) = [pid for pid in children_of(server) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(core, signal.SIGSTOP)
    job.process.terminate()
    assert job.process.wait(END_S) == 0
    wait_for(lambda: not job.engine(), END_S, "processes of the job are left")  # one renders until its input ends
    assert not list(job.temporary.iterdir())
    assert job.log.read_text() == ""
    assert controller.left == ["rollout-5"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(signal.SIGSTOP, "hangs: no token and no answer for 3 s, while ", id="stop"),
        pytest.param(signal.SIGKILL, "died", id="kill"),
    ],
)
@pytest.mark.parametrize("job", [pytest.param(3, id="3s")], indirect=True)
@pytest.mark.faults_slow
def test_a_job_whose_engine_hangs_or_dies_leaves_with_the_reason(
    run: Run, job: Job, controller: FakeController, number: signal.Signals, said: str
) -> None:
    wait_for(lambda: controller.claims or job.process.poll() is not None, START_S, "no claim")
    server = server_of(job)
    (core,) = [pid for pid in children_of(server) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(core, number)
    controller.work += [item(name) for name in ("g1", "g2", "g3", "g4")]
    assert job.process.wait(END_S) == EngineError.exit_code
    log = job.log.read_text()
    (reason,) = [line for line in log.splitlines() if "EngineError: " in line]
    assert reason.startswith(f"EngineError: the inference engine {said}")
    assert "never retrieved" not in log
    assert controller.left == ["rollout-5"]
    (process_status,) = [
        process_status
        for process_status in read_process_statuses(run, ATTEMPT)
        if process_status.process == "rollout-5"
    ]
    assert process_status.state.startswith("failed: the inference engine")
    wait_for(lambda: not job.engine(), END_S, "processes of the job are left")  # one renders until its input ends
    assert not list(job.temporary.iterdir())


@pytest.mark.faults_slow
def test_nothing_survives_a_job_that_is_killed(job: Job) -> None:
    def core_is_spawned() -> bool:  # vLLM itself would leave it behind at this moment
        return any(len(children_of(pid)) >= 2 for pid in children_of(job.process.pid))

    wait_for(core_is_spawned, START_S, "the engine did not come up")
    assert len(job.engine()) >= 2
    job.process.kill()
    wait_for(lambda: not job.engine(), END_S, "processes are left")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_survives_a_job_that_ends_during_its_start(job: Job, number: signal.Signals) -> None:
    wait_for(lambda: children_of(job.process.pid), 60, "no server")
    job.process.send_signal(number)
    assert job.process.wait(END_S) == (0 if number == signal.SIGTERM else -number)
    wait_for(lambda: not job.engine(), END_S, "its engine, which had hardly been started, goes on")
    assert number == signal.SIGKILL or not list(job.temporary.iterdir())
