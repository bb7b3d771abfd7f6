"""jobs/train.py under torchrun, with the real controller; the test stands in for the rollout worker, with random samples."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import math
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.controller.api import Api
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.service import Service
from hpcrl.errors import CommitError
from hpcrl.launch.local.replay import differences, plan_all
from hpcrl.observe.metrics import merged, read_metrics
from hpcrl.rundir.commit import committed, is_committed, read_json, verify, write_text
from hpcrl.rundir.layout import Run, step_of, version_of
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.http_server import Guard, Signed, bind, serve
from hpcrl.runtime.process_status import StatusWriter, read_process_statuses
from hpcrl.runtime.token import read_token
from hpcrl.types import GroupMeta, Prompt, Work
from tests.paths import ROOT
from tests.rows import group_meta, write_group
from tests.trainer.launcher import environment, run_ranks, start_ranks
from tests.trainer.material import make_sample, torchrun
from tests.trainer.saving.hostile import REFUSED, make_hostile
from tests.trainer.scenarios import laid_over

STEPS = 4
JOB = ROOT / "jobs" / "train.py"
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
Replay = Callable[..., tuple[int, str, str]]
SCHEDULE = Schedule(
    batch_size=4, n_samples=3, staleness=0, total_steps=STEPS, seed=1, eval_interval=-1, eval_before_train=False, eval_n_samples=1,
    order_seed=1, groups_at_once=None, eval_prompts_at_once=1,
)  # fmt: skip


def make_run(path: Path, model: Path, changes: dict[str, Any] | None = None) -> Run:
    """Return a run whose configuration has `changes` laid over it."""
    run = Run(path / "project" / "run")
    config = Config.from_dict(
        laid_over(
            {
                "data": {"train_data": ["unused.parquet"]},
                "trainer": {
                    "policy": {
                        "model": {"path": str(model)},
                        "optimizer_config": {"lr": 1e-3},
                        "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
                    },
                    "profiler": {"enable": True},
                    "train_batch_size": 4,
                    "policy_mini_batch_size": 2,
                    "algorithm": {
                        "use_kl_loss": False,
                        "use_kl_in_reward": True,
                        "kl_loss_coef": 0.1,
                        "kl_ctrl": {"type": "adaptive", "kl_target": 10.0, "horizon": 20},
                        "reference_reset_interval": 1,
                    },
                    "max_tokens_per_micro_batch": 30,
                    "dump_data_batch": True,
                    "ckpt_interval": 2,
                    "max_ckpts_to_keep": -1,
                    "ckpt_mode": "async",
                    "hf_save_interval": STEPS,
                    "eval_interval": -1,
                },
                "generator": {
                    "n_samples_per_prompt": 3,
                    "on_logprob_mismatch": "warn",  # samples are made up
                    "inference_engine": {"model_dtype": "float32"},
                },
                "environment": {"env_class": "sort_letters"},
            },
            changes or {},
        )
    )
    write_text(run.config, config.to_toml())
    write_text(run.token, "secret\n", mode=0o600)
    return run


@contextlib.contextmanager
def controller(run: Run, attempt: int, schedule: Schedule = SCHEDULE) -> Iterator[None]:
    listener = bind("127.0.0.1")
    StatusWriter(run, "controller", attempt).write("serving", url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    prompts = [Prompt(f"p{i}", [{"role": "user", "content": str(i)}], "sort_letters", {}, "letters") for i in range(16)]

    async def main() -> None:
        api = Api(Service(run, attempt, schedule, prompts, []), save_seconds=60)
        app = Guard(api.routes(), Signed(read_token(run), run.name, attempt))

        async def until() -> None:
            watching = asyncio.create_task(api.watch(run, attempt, print))
            while not ended.is_set():
                await asyncio.sleep(0.1)
            watching.cancel()

        await serve(app, listener, until())

    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)
        assert not thread.is_alive()


def finish(run: Run, work: Work, version: int) -> GroupMeta:
    """Make up a group; the same for the same work."""
    generator = torch.Generator().manual_seed(work.seed)
    lengths = torch.randint(5, 16, (work.n_samples,), generator=generator).tolist()
    rewards = torch.rand(work.n_samples, generator=generator).tolist()
    samples = [make_sample(generator, length, prompt=3) for length in lengths]
    for sample, reward in zip(samples, rewards, strict=True):
        sample.rewards[-1] = reward
    path = run.samples_of(0) / f"{work.group_id}.safetensors"
    meta = group_meta(
        group_id=work.group_id,
        kind=work.kind,
        replica=0,
        path=str(path.relative_to(run.path)),
        rewards=rewards,
        lengths=lengths,
        response_lengths=[int(sample.loss_mask.sum()) for sample in samples],
        stop_reasons=["stop"] * work.n_samples,
        oldest_version=version,
        newest_version=version,
        data_source="letters",
        seconds=0.1,
    )
    return write_group(path, samples, meta)


class Forked:
    """One rank of a trainer, forked from a process that has imported what it needs; asked as a Popen is."""

    def __init__(self, run: Run, attempt: int, **variables: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        given = {"HPCRL_ATTEMPT": str(attempt), **variables}
        folder = Path(self._folder.name)
        self._started = start_ranks(folder, 1, run.path, script="../jobs/train.py", limit_s=300, variables=given)

    def poll(self) -> int | None:
        return self._started.poll()

    def communicate(self) -> tuple[str, int | None]:
        """Return what it wrote, once it has ended, and its exit code."""
        wait_for(lambda: self.poll() is not None, 360)
        output = self._started.out.read_text() + self._started.err.read_text(), self.poll()
        self._folder.cleanup()
        return output


def work_until(run: Run, attempt: int, last: int, process: subprocess.Popen[str] | Forked) -> None:
    """Be the rollout worker until version `last` is there, as long as the trainer lives."""
    client, version = ControllerClient(run, attempt), 0
    while version < last:
        ended = process.poll() is not None  # before the controller says what it published
        answer = client.call("claim", worker="rollout-0", version=version, capacity=4, holding=[])
        groups = [finish(run, Work.from_json(item), version) for item in answer["work"]]
        if groups:
            client.call("complete", worker="rollout-0", groups=[group.to_json() for group in groups])
        version = answer["version"] or 0  # none before the trainer has started
        assert version >= last or not ended, process.communicate()[0]
    client.close()


@contextlib.contextmanager
def trainer(run: Run, attempt: int, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """Start a trainer as an agent does: one rank without torchrun."""
    variables = environment() | {"HPCRL_ATTEMPT": str(attempt)}
    command = torchrun(ranks, JOB, run.path)
    if ranks == 1:
        command, variables = [sys.executable, str(JOB), str(run.path)], variables | ONE_RANK
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(180)


def wait_for(what: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def said(run: Run, attempt: int) -> str:
    return next(
        (
            process_status.state
            for process_status in read_process_statuses(run, attempt)
            if process_status.process == "trainer"
        ),
        "",
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Run:
    """One of two ranks gets SIGTERM after step 3 and both stop; what they then saved is lost; one rank does steps 3 and 4."""
    run = make_run(tmp_path_factory.mktemp("job"), model_path)
    with controller(run, 1), trainer(run, 1, ranks=2) as process:
        work_until(run, 1, 3, process)
        wait_for(lambda: said(run, 1) == "waiting for batch")
        *_, rank = children(process.pid)  # one alone: both stop after the same step
        os.kill(rank, signal.SIGTERM)
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
    assert said(run, 1) == "stopped"
    assert committed(run.checkpoints, step_of) == [2, 3], "a stop saves what the interval has not"
    os.rename(run.checkpoint(3), run.checkpoints / "lost")
    with controller(run, 2):
        alone = Forked(run, 2)
        work_until(run, 2, STEPS, alone)
        output, code = alone.communicate()
        assert code == 0, output
    assert said(run, 2) == "finished"
    assert output.count(f"step {STEPS}/{STEPS}: reward ") == 1, "rank 0 logs each step in a line"
    return run


def test_what_is_left(run: Run) -> None:
    assert committed(run.checkpoints, step_of) == [2, STEPS]
    assert committed(run.weights, version_of) == [STEPS - 1, STEPS]
    assert is_committed(run.export(STEPS))
    saved = verify(run.checkpoint(STEPS))
    assert set(saved["carried"]) == {"kl_coef", "kl_coef_start"}
    assert saved["cursor"] == STEPS * SCHEDULE.batch_size
    assert "reference/.metadata" in saved["files"], "a reference that has moved"


def test_a_step_done_again_is_the_same(run: Run) -> None:
    lines = [json.loads(line) for line in run.metrics_of("trainer").read_text().splitlines()]
    first, second = (line["metrics"] for line in lines if line.get("step") == 3 and "timing/step" in line["metrics"])
    for name in (
        "policy/final_loss",
        "loss/avg_kl",
        "loss/kl_loss_coef",
        "policy/grad_norm",
        "policy/policy_lr",
        "loss/avg_final_rewards",
    ):
        assert first[name] == pytest.approx(second[name], abs=1e-6), name
    assert first["loss/avg_kl"] == pytest.approx(0, abs=1e-6), "the reference is the policy of the step before"
    assert first["loss/kl_loss_coef"] < 0.09, "twice adapted, over the restart too"


def test_a_step_done_again_is_dumped_again(run: Run) -> None:
    """Two ranks trained step 3 first, one rank last."""
    assert committed(run.dumps, step_of) == [1, 2, 3, STEPS]
    ranks = [[0, 1], [0, 1], [0], [0]]
    for step, there in enumerate(ranks, start=1):
        names = set(verify(run.dump(step))["files"])
        assert names == {f"mini-{mini}-rank-{rank}.safetensors" for mini in range(2) for rank in there}
        tensors = [load_file(run.dump(step) / name) for name in sorted(names)]
        assert sum(len(found["lengths"]) for found in tensors) == 4 * 3
        assert all("ref_logprobs" in found and "advantages" in found for found in tensors)


def test_the_third_step_of_an_attempt_is_profiled(run: Run) -> None:
    """wait_steps, warmup_steps and active_steps are 1; the second attempt has two steps, so nothing to record."""
    trace = json.loads(gzip.decompress(run.profile_of(1, 0).read_bytes()))["traceEvents"]
    names = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
    assert names.count("ProfilerStep#2") == 1
    assert sum(name.startswith("Optimizer.step") for name in names) == 2, "mini-batches of one step"
    assert not run.profile_of(1, 1).exists()
    assert not run.profile_of(2, 0).exists()


def test_metrics(run: Run) -> None:
    records = [record for record in read_metrics(run) if record.process == "trainer"]
    whole = [record for record in records if "timing/step" in record.metrics]
    assert [(record.attempt, record.step) for record in whole] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    saved = [record.step for record in records if "timing/save_checkpoints" in record.metrics]
    assert saved == [2, STEPS]
    for name in ("timing/save_checkpoints_behind", "throughput/checkpoint_gib"):
        behind = [record.step for record in records if name in record.metrics]
        assert behind == [STEPS], "of the first one it was known in step 3, which was done again"
    manifest = read_json(run.checkpoint(STEPS) / "manifest.json") or {}
    size = merged(run)[STEPS]["throughput/checkpoint_gib"] * 2**30
    assert size == pytest.approx(sum(entry["size"] for entry in manifest["files"].values()))
    names = set(merged(run)[STEPS])
    assert names >= {
        "policy/policy_loss", "policy/policy_entropy", "policy/response_length", "policy/loss_metrics/clip_ratio",
        "policy/rollout_train_logprobs_abs_diff_mean", "policy/rollout_train_logprobs_abs_diff_std", "policy/skipped_updates",
        "loss/avg_raw_advantages", "loss/avg_raw_advantages_abs", "throughput/tokens_per_second",
        "timing/step", "timing/policy_train", "timing/sync_weights", "timing/save_checkpoints", "timing/save_hf_model",
        "memory/peak_host_gib", "memory/host_gib", "throughput/idle_share", "throughput/train_tflops_per_second_per_rank", "timing/update_ref_with_policy", "policy/shared_prefix_tokens", "timing/dump_data_batch",
    }  # fmt: skip


def test_histograms_are_of_all_ranks(run: Run) -> None:
    records = [record for record in read_metrics(run) if "timing/step" in record.metrics]
    for record in (record for record in records if run.dump(record.step).is_dir()):
        advantages, tokens = list[float](), 0
        for path in run.dump(record.step).glob("*.safetensors"):
            tensors = load_file(path)
            advantages += tensors["advantages"][tensors["loss_mask"] > 0].tolist()
        tokens, found = len(advantages), record.histograms["advantage"]
        assert (found.low, found.high) == (min(advantages), max(advantages))
        assert sum(found.counts) == tokens
        assert found.counts[-1] >= advantages.count(found.high)
        apart = record.histograms["log10_mismatch"]
        assert sum(apart.counts) == tokens
        edges = [10 ** (apart.low + at * (apart.high - apart.low) / len(apart.counts)) for at in range(21)]
        mean = record.metrics["policy/rollout_train_logprobs_abs_diff_mean"]
        least, most = (sum(map(operator.mul, apart.counts, each)) / tokens for each in ([0, *edges[1:]], edges[1:]))
        assert least * 0.9 <= mean <= most * 1.1


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Replay steps: the command in this process, which starts the trainer in another, and its code and texts."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["replay", *words])
        return code, *capsys.readouterr()

    return call


def test_a_replayed_step_is_the_same_and_leaves_the_run_alone(run: Run, tmp_path: Path, replay: Replay) -> None:
    """From checkpoint 2 over step 3, whose end moves the reference; one rank, as the run had in the end. Twice, and with a dump."""
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    output = tmp_path / "replayed"
    code, out, err = replay(str(run.path), "--step", str(STEPS), "--times", "2", "--output", str(output), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [(one["time"], one["step"]) for one in found] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    recorded = merged(run)
    for one in found:
        for name in ("policy/final_loss", "policy/grad_norm", "policy/policy_lr", "loss/kl_loss_coef", "loss/avg_kl"):
            assert one["metrics"][name] == pytest.approx(recorded[one["step"]][name], rel=1e-6, abs=1e-9), (one, name)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    for name in verify(run.dump(STEPS))["files"]:
        theirs, own = load_file(run.dump(STEPS) / name), load_file(Run(output).dump(STEPS) / name)
        assert torch.equal(theirs["token_ids"], own["token_ids"])
        torch.testing.assert_close(theirs["ref_logprobs"], own["ref_logprobs"], atol=1e-6, rtol=0)


def test_all_steps_that_are_left_have_the_same_bits_again(run: Run, tmp_path: Path, replay: Replay) -> None:
    """Those of the second attempt, from the checkpoint of the first one: metrics of each step, and the weights that are kept."""
    code, out, err = replay(str(run.path), "--all", "--ranks", "1", "-o", str(tmp_path / "again"))
    assert code == 0, out + err
    assert "step 4 from s000002 over step 3, 1 rank\n  the same bits: 2 steps, and weights of " in out
    plan, last = asdict(plan_all(run)), (read_json(tmp_path / "again" / "results.json") or [])[-1]
    assert differences(plan, last) == []
    norm = last["metrics"]["policy/grad_norm"]
    last["metrics"]["policy/grad_norm"] = math.nextafter(norm, 0.0)
    assert differences(plan, last) == [f"policy/grad_norm: {norm!r} and {math.nextafter(norm, 0.0)!r}"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("2", r"the samples of step 1 are gone: .*; those of steps 3 to 4 are there; what step 1 trained is in "),
        ("9", r"has not trained step 9; steps 1 to 4 have been"),
    ],
)
def test_what_cannot_be_replayed(run: Run, step: str, message: str, replay: Replay) -> None:
    code, _, err = replay(str(run.path), "--step", step)
    assert code == 5
    assert re.search(message, err), err


def test_a_strangers_checkpoint_is_not_replayed(run: Run, tmp_path: Path, replay: Replay) -> None:
    shutil.copytree(run.path, tmp_path / "theirs", symlinks=True)
    theirs = Run(tmp_path / "theirs")
    marker = make_hostile(theirs.checkpoint(2), "reference")
    code, _, err = replay(str(theirs.path), "--step", str(STEPS), "--output", str(tmp_path / "replayed"))
    assert not marker.exists()
    assert code == CommitError.exit_code
    assert re.search(f"{theirs.checkpoint(2)}/reference/{REFUSED}", err), err


def test_engines_get_weights_at_every_second_step(tmp_path: Path, model_path: Path) -> None:
    """The run ends at step 3, whose weights are there too. What version 0 begins is trained in steps 1 and 2."""
    rarely = {"max_staleness_steps": 1, "sync_weight_interval": 2}
    changes = {"max_steps": 3, "fully_async": rarely, "profiler": {"enable": False}, "dump_data_batch": False}
    run = make_run(tmp_path, model_path, {"trainer": changes | {"ckpt_interval": 0, "hf_save_interval": 0}})
    schedule = replace(SCHEDULE, staleness=1, total_steps=3)
    with controller(run, 1, schedule):
        rank = Forked(run, 1)
        work_until(run, 1, 3, rank)
        output, code = rank.communicate()
        assert code == 0, output
    assert committed(run.weights, version_of) == [2, 3]
    metrics = merged(run)
    assert [metrics[step]["async/staleness_max"] for step in (1, 2, 3)] == [0, 1, 0]
    assert ["timing/sync_weights" in metrics[step] for step in (1, 2, 3)] == [False, True, True]


def test_the_first_error_is_recorded(tmp_path: Path) -> None:
    broken = make_run(tmp_path, tmp_path / "no-such-model")
    output, code = Forked(broken, 1, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json")).communicate()
    assert code != 0, output
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert "DataError" in message
    assert "no-such-model" in message
    assert "trainer.policy.model.path" in message
    assert not broken.weights.exists()


def test_ranks_begin_with_a_sum_over_their_network() -> None:
    done = run_ranks(3, json.dumps([["summing", {}]]))
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"all-reduce of 1 MiB over 3 ranks: .* ms, bus bandwidth ([\d.]+) GB/s \(gloo\)", done.stderr)
    assert [float(line) > 0 for line in lines] == [True], done.stderr
    wrong = run_ranks(2, json.dumps([["summing", {"wrong": 0}]]))
    assert wrong.returncode == 1
    assert (
        "DeviceError: rank 1 of 2: an all-reduce over the trainer's ranks gave 10.0 to 10.0, expected 3.0"
        in wrong.stderr
    )
