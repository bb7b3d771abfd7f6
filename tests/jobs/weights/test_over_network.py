"""Whole runs whose engines get new weights over the network, and as changes; whoever dies, stops or is late, the run goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.data.weight_files import PublishedWeights
from hpcrl.observe.metrics import merged
from hpcrl.rundir.commit import committed
from hpcrl.rundir.layout import Run, version_of
from hpcrl.rundir.ledger import read_attempts, read_outcome
from tests.jobs.small_run import SMALL, curve, finish, hpcrl, logs_of, pid_of, trained_groups, wait_for
from tests.paths import QUICKSTART

ENGINE = "generator.inference_engine"
STAGE_S = 3
pytestmark = pytest.mark.faults_slow


@pytest.fixture
def copies() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield place
    shutil.rmtree(place)


def submit(
    cwd: Path,
    copies: Path,
    *settings: str,
    backend: str = "gloo",
    engine: str = "transformers",
    stage_s: float = STAGE_S,
) -> Run:
    network = [f"{ENGINE}.weight_sync_backend={backend}", f"{ENGINE}.weight_sync_timeout_seconds={stage_s}"]
    own = [
        *SMALL, f"{ENGINE}.backend={engine}", f"{ENGINE}.weight_copy_dir={copies}", *(network if backend == "gloo" else []),
    ]  # fmt: skip
    done = hpcrl("submit", str(QUICKSTART), "--local", "trainer.run_name=run", *own, *settings, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return Run.open(cwd / "runs" / "quickstart" / "run")


def of_replica(run: Run, name: str) -> dict[int, float]:
    return curve(run, f"weights/{name}/rollout-0")


def expect_done(run: Run, attempt: int = 1, steps: int = 4) -> None:
    """Every version was proven, and no group was trained twice."""
    assert finish(run, attempt) == "done", logs_of(run)
    groups = [group for batch in trained_groups(run) for group in batch]
    assert len(groups) == len(set(groups)) == 8 * steps
    assert max(of_replica(run, "probe_difference").values()) < 0.3


def log_of(run: Run, process: str) -> str:
    return run.log(1, process).read_text(errors="replace")


@pytest.mark.parametrize(
    ("engine", "ranks", "more"),
    [
        ("transformers", 2, []),
        ("vllm", 1, []),
        ("vllm", 2, [f"{ENGINE}.tensor_parallel_size=2"]),
        ("transformers", 2, ["trainer.strategy=megatron", "trainer.policy.fsdp_config=default"]),
    ],
    ids=["fsdp2", "vllm", "tensor parallel", "megatron"],
)
def test_all_versions_come_over_the_network(
    place: Path, copies: Path, engine: str, ranks: int, more: list[str]
) -> None:
    placed = f"trainer.placement.policy_num_gpus_per_node={ranks}"
    run = submit(place, copies, "trainer.eval_interval=4", placed, *more, engine=engine, stage_s=30)
    expect_done(run)
    received = of_replica(run, "received")
    received.pop(4, None)  # the last one may be asked for when the trainer has ended
    assert received
    assert set(received.values()) == {1.0}, logs_of(run)
    assert len(PublishedWeights.read(run.weights_of(4)).senders) == ranks
    assert not list(copies.iterdir()), "the copy has gone with its replica"


@pytest.mark.parametrize("backend", ["filesystem", "gloo"])
def test_changes_of_a_small_learning_rate_are_small(place: Path, copies: Path, backend: str) -> None:
    small = [
        "trainer.policy.optimizer_config.lr=1e-6", f"{ENGINE}.model_dtype=bfloat16", f"{ENGINE}.full_weights_interval=4",
        "trainer.max_steps=6", "trainer.eval_interval=0",
    ]  # fmt: skip
    run = submit(place, copies, *small, backend=backend)
    expect_done(run, steps=6)
    fetched, whole = of_replica(run, "fetch_gib"), of_replica(run, "load_gib")
    later = [fetched[version] / whole[version] for version in fetched if version in (2, 3, 4, 6)]
    print(f"changes have {', '.join(f'{share:.1%}' for share in later)} of the bytes")
    assert later
    assert max(later) < 0.3
    assert committed(run.weights, version_of) == [5, 6]
    assert PublishedWeights.read(run.weights_of(5)).base is None


def stopped_at(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until a process of the run has come to its fault point, and let those that start later pass it."""
    wait_for(lambda: re.search("fault point weights", logs_of(run)) or read_outcome(run), lambda: logs_of(run), 120)
    assert not read_outcome(run), logs_of(run)
    monkeypatch.delenv("HPCRL_FAULT")


@pytest.mark.parametrize(
    "point", ["weights.ask@2", "weights.receive@2", "weights.changed@2"], ids=["before", "in the middle", "afterwards"]
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_replica_hurts_itself_only(
    place: Path, copies: Path, monkeypatch: pytest.MonkeyPatch, point: str, how: signal.Signals
) -> None:
    """Before it has asked, while it is sent to, and when it has all: training goes on in the same attempt, and so does the replica.

    One that was stopped goes on after more than a stage.
    """
    monkeypatch.setenv("HPCRL_FAULT", f"{point}:sleep=2")
    run = submit(place, copies, f"{ENGINE}.full_weights_interval=10", "trainer.eval_interval=0")
    stopped_at(run, monkeypatch)
    worker = pid_of(run, "rollout")
    os.kill(worker, how)
    if how == signal.SIGSTOP:
        time.sleep(2 * STAGE_S)
        os.kill(worker, signal.SIGCONT)
    expect_done(run)
    assert len(read_attempts(run)) == 1


def test_a_trainer_that_does_not_send_costs_a_stage(place: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other threads train: the version is read from its files, the next ones come over the network again."""
    # over the pair that the first version was sent by, and over another one
    monkeypatch.setenv("HPCRL_FAULT", "weights.send@2:sleep=20 weights.send@3:sleep=20")
    run = submit(place, copies, "trainer.eval_interval=0")
    expect_done(run)
    received = of_replica(run, "received")
    assert 0.0 in received.values(), received
    assert 1.0 in received.values(), received
    assert "did not come over the network, its files are read" in log_of(run, "rollout-0")
    late = min(version for version, value in received.items() if value == 0.0)
    assert STAGE_S <= of_replica(run, "fetch_seconds")[late] < 4 * STAGE_S


def test_a_trainer_that_is_killed_while_it_sends(place: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt ends at once, and the next one goes on, over the network too."""
    monkeypatch.setenv("HPCRL_FAULT", "weights.send@2:sleep=2")
    run = submit(place, copies, "trainer.eval_interval=0", "trainer.max_steps=6")
    stopped_at(run, monkeypatch)
    began = time.monotonic()
    os.kill(pid_of(run, "train"), signal.SIGKILL)
    assert finish(run, 1) == "failed", logs_of(run)
    assert time.monotonic() - began < 40
    done = hpcrl("resume", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    expect_done(run, attempt=2, steps=6)
    assert 1.0 in [
        metrics["weights/received/rollout-0"]
        for metrics in merged(run).values()
        if "weights/received/rollout-0" in metrics
    ]
