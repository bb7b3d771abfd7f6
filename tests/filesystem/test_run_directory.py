"""What nodes tell each other through a run directory that they see late, through a filesystem that forbids and fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from hpcrl.config import Config
from hpcrl.controller.recovery import read_history
from hpcrl.data.group_file import check_group
from hpcrl.errors import CommitError, SubmitError
from hpcrl.launch.submit import submit
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.tensorboard.follower import Follower
from hpcrl.rollout.weights.fetch import fetch
from hpcrl.rundir import commit
from hpcrl.rundir.checkpoints import Retention, newest_usable, set_aside_after
from hpcrl.rundir.checksums import changed_files, note_checksums
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import find_attempt, open_attempt, outcome_of, read_attempts, report_outcome
from hpcrl.runtime.process_status import StatusWriter, read_process_status
from hpcrl.runtime.signals import ask_to_stop, stop_asked
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.committer import CheckpointContent, Committer, save_tensors
from hpcrl.types import GroupMeta, Row
from tests.filesystem.cluster import view
from tests.filesystem.view import FORBIDDEN, Behaviour
from tests.paths import CONFIGS
from tests.rows import group_meta, write_group

MINUTE = Behaviour(names_s=60, absent_s=60, attributes_s=60)
"""A node that looks again only where NFS does."""


@pytest.fixture
def below(tmp_path: Path) -> Path:
    for name in ("below", "writer", "reader"):
        (tmp_path / name).mkdir()
    return tmp_path / "below"


@pytest.fixture
def nodes(below: Path) -> Iterator[tuple[Run, Run]]:
    """The same run as the node sees it that writes, and as another one does that looks."""
    writer, reader = (below.with_name(name) for name in ("writer", "reader"))
    for name in ("endpoints", "control", "checkpoints", "samples", "outcomes"):
        (below / name).mkdir()
    with view(below, writer, MINUTE), view(below, reader, MINUTE):
        yield Run(writer), Run(reader)


def save(run: Run, step: int, attempt: int = 1) -> None:
    with commit.committed_directory(run.checkpoint(step), attempt, step=step) as directory:
        (directory / "model").write_text(f"{step} by {attempt}")


def test_the_layer_shows_late_what_another_node_did(nodes: tuple[Run, Run]) -> None:
    """As NFS does: a name that was not there, a size, a file that was replaced, one that goes while it is open."""
    writer, reader = nodes
    mine, other = writer.path / "file", reader.path / "file"
    assert not other.exists()
    mine.write_text("old")
    assert not other.exists()
    assert "file" in os.listdir(reader.path)
    assert other.stat().st_size == 3
    with other.open() as stale:
        commit.write_text(mine, "newer")
        assert other.stat().st_size == 3
        assert other.read_text() == "newer"
        with pytest.raises(OSError, match="Stale file handle"):
            stale.read()
    with mine.open() as removed:
        mine.unlink()
        assert [name[:4] for name in os.listdir(writer.path) if name.startswith(".nfs")] == [".nfs"]
        assert removed.read() == "newer"
    assert not [name for name in os.listdir(writer.path) if name.startswith(".nfs")]


def test_what_one_node_writes_another_reads_at_once(nodes: tuple[Run, Run]) -> None:
    """Also where it looked a moment ago, and before it remembers anew what is there."""
    writer, reader = nodes
    assert read_attempts(reader) == []
    assert find_attempt(reader, "7.0") is None
    open_attempt(writer, "7.0", ["n1", "n2"])
    assert find_attempt(reader, "7.0")

    status = StatusWriter(writer, "controller", 1)
    assert read_process_status(reader, "controller", 1) is None
    for state in ("starting", "serving"):
        status.write(state, url=f"http://{state}")
        assert (found := read_process_status(reader, "controller", 1)) is not None
        assert (found.state, found.facts["url"]) == (state, f"http://{state}")

    assert stop_asked(reader, 1) is None
    ask_to_stop(writer, 1, "interrupted")
    assert stop_asked(reader, 1) == "interrupted"

    assert outcome_of(reader, 1) is None
    report_outcome(writer, 1, "interrupted", "stopped", "agent-0")
    assert outcome_of(reader, 1)


def test_a_directory_that_two_nodes_make_at_the_same_time(nodes: tuple[Run, Run]) -> None:
    """The agents of two nodes did so with logs/1, and the second one ended."""
    writer, reader = nodes
    for path in (reader.path / "logs", reader.path / "logs" / "1" / "stacks"):
        assert not path.exists()
    commit.make_directory(writer.path / "logs" / "1")
    commit.make_directory(reader.path / "logs" / "1" / "stacks")
    (reader.path / "logs" / "1" / "agent-1.log").write_text("started")
    with pytest.raises(FileExistsError):
        commit.make_directory(writer.path / "logs" / "1" / "agent-1.log")


def test_a_commit_that_another_node_made_a_moment_ago(nodes: tuple[Run, Run]) -> None:
    """A node that looked in between, and takes the directory for one that was never committed, would delete it."""
    writer, reader = nodes
    save(writer, 3)
    commit.begin(writer.checkpoint(6), 1)
    assert not commit.is_committed(reader.checkpoint(6))
    os.rename(commit.staging(writer.checkpoint(6), 1), writer.checkpoint(6))
    assert commit.committed(reader.checkpoints, step_of) == [3]
    assert not (reader.checkpoint(6) / commit.COMMIT).is_file()
    os.rename(writer.checkpoint(6), commit.staging(writer.checkpoint(6), 1))
    commit.finish(writer.checkpoint(6), 1, step=6)

    assert commit.committed(reader.checkpoints, step_of) == [3, 6]
    assert newest_usable(reader, 2, print) == reader.checkpoint(6)
    set_aside_after(reader, 2, reader.checkpoint(6), commit.unfenced, print)
    assert commit.verify(writer.checkpoint(6))["step"] == 6


def test_a_filesystem_that_forbids(below: Path) -> None:
    """No hard links, locks, syncs of directories, changes of modes and owners; what is open cannot be removed."""
    place = below.with_name("writer")
    with view(below, place, Behaviour(errors=FORBIDDEN, types=False)) as counts:
        run = Run(place)
        run.outcomes.mkdir()
        open_attempt(run, "7.0", ["n1"])
        report_outcome(run, 1, "failed", "first", "agent-0")
        assert report_outcome(run, 1, "failed", "second", "agent-1").message == "first"
        save(run, 3)
        save(run, 6)
        assert newest_usable(run, 2, print) == run.checkpoint(6)
        with (run.checkpoint(3) / "model").open():
            commit.discard(run.checkpoint(3))
            assert "s000003" not in os.listdir(run.checkpoints)
        set_aside_after(run, 2, run.checkpoint(6), commit.unfenced, print)
        assert os.listdir(run.checkpoints) == ["s000006"]
    assert counts["LINK"]
    assert counts["FSYNCDIR"]


@pytest.mark.parametrize("what", ["WRITEBACK", "FSYNC", "FLUSH", "WRITE"])
def test_bytes_that_a_filesystem_takes_and_loses(below: Path, what: str) -> None:
    """It tells so where the file is synced or closed; nothing is committed then."""
    place = below.with_name("writer")
    with view(below, place, Behaviour(errors={what: ("EDQUOT", 1.0)})):
        with pytest.raises(OSError, match="quota") as refused:
            save_tensors({"a": torch.ones(1000)}, place / "rng-0.safetensors")
        assert refused.value.errno == errno.EDQUOT
        with pytest.raises((OSError, CommitError)):
            save(Run(place), 3)
        assert not (place / "rng-0.safetensors").exists()
        assert not commit.is_committed(Run(place).checkpoint(3))


def test_a_checkpoint_of_torch_whose_writes_fail(below: Path, alone: World) -> None:
    """It says which one and why, whatever torch makes of it."""
    run = Run(below.with_name("writer"))
    told = list[str]()
    with view(below, run.path, Behaviour(errors={"WRITE": ("EIO", 0.15)}, seed=5)):
        for step in range(1, 11):
            state = {f"tensor {number}": torch.ones(4000 + 100 * step) for number in range(10)}
            content = CheckpointContent(
                run.checkpoint(step),
                {"model": lambda directory, _, state=state: save_state(state, checkpoint_id=directory, no_dist=True)},
                {},
                {"step": step},
            )
            try:
                Committer(run, 1, alone, Retention()).commit(content)
            except CommitError as error:
                told.append(str(error))
    assert len(told) > 5
    assert all("Input/output error" in text and str(run.checkpoints) in text for text in told)


def group(run: Run, name: str) -> GroupMeta:
    """Write a group of one sample of 2,000 tokens, as a rollout worker does."""
    ones = np.ones(2000, dtype=np.float32)
    row = Row(np.arange(2000), ones, -ones, np.zeros(2000, dtype=np.int32), ones, "stop", {})
    path = run.samples_of(0) / f"{name}.safetensors"
    meta = group_meta(
        group_id=name, path=str(path.relative_to(run.path)), rewards=[2000.0], lengths=[2000], response_lengths=[2000],
        stop_reasons=["stop"], env_metrics=[{}],
    )  # fmt: skip
    return write_group(path, [row], meta)


def prepared(root: Path) -> submit.Submission:
    quickstart = Config.from_toml(CONFIGS / "quickstart.toml", [f"slurm.root={root}", "trainer.run_name=run"])
    return submit.prepare("run", [(quickstart, [])])


@pytest.mark.parametrize("what", ["WRITE", "WRITEBACK"])
def test_a_submission_that_the_filesystem_refuses_leaves_nothing(below: Path, what: str) -> None:
    """And says which file it was about."""
    place = below.with_name("writer")
    with (
        view(below, place, Behaviour(errors={what: ("EDQUOT", 0.02)})),
        pytest.raises(SubmitError, match=r"quickstart.*cannot be written: Disk quota exceeded"),
    ):
        submit.submit(prepared(place), local=True)
    assert list(below.iterdir()) == []


def test_code_is_copied_where_modes_cannot_be_set(below: Path) -> None:
    place = below.with_name("writer")
    with view(below, place, Behaviour(errors=FORBIDDEN)):
        submit._copy_code(place)
    for name, source in submit.code_sources().items():
        copied = {path.relative_to(below / "code" / name) for path in (below / "code" / name).rglob("*.py")}
        assert copied == {path.relative_to(source) for path in source.rglob("*.py")}


def test_writes_that_are_cut_short(below: Path) -> None:
    place, tensors = below.with_name("writer"), {"a": torch.arange(300_000)}
    with view(below, place, Behaviour(short=0.5, seed=3)) as counts:
        save_tensors(tensors, place / "a.safetensors")
        meta = group(Run(place), "g00000001")
    assert counts["short"]
    assert torch.equal(load_file(below / "a.safetensors")["a"], tensors["a"])
    assert check_group(below / meta.path, meta) == meta


@pytest.mark.parametrize("operation", ["OPEN", "READ"])
def test_a_group_that_cannot_be_read_now_is_not_thrown_away(below: Path, operation: str) -> None:
    """The filesystem may be back for the next attempt; the error says which file it was."""
    group(Run(below), "g00000001")
    place = below.with_name("reader")
    with (
        view(below, place, Behaviour(errors={operation: ("EIO", 1.0)})),
        pytest.raises(OSError, match=r"Input/output error.*g00000001"),
    ):
        read_history(Run(place), 0, 1, lambda _: True, lambda *_: True)
    with view(below, place, Behaviour()):
        assert 1 in read_history(Run(place), 0, 1, lambda _: True, lambda *_: True).finished


def test_a_stop_request_is_heard_after_the_filesystem_was_away(below: Path) -> None:
    """The thread that watches for it lives on."""
    run = Run(below.with_name("reader"))
    (below / "control").mkdir()
    ask_to_stop(Run(below), 3, "interrupted")
    with subprocess.Popen([sys.executable, "-c", FOLLOWS, str(run.path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            with view(below, run.path, Behaviour(errors={"OPEN": ("EIO", 1.0)})):
                assert "Input/output error" in process.stdout.readline()
            with view(below, run.path, Behaviour()):
                assert process.wait(10) == 7
        finally:
            process.kill()


def test_the_end_of_a_batch_script_waits_for_the_filesystem(below: Path) -> None:
    """Else nobody would requeue the job."""
    run = Run(below.with_name("reader"))
    (below / "config.toml").write_text('[trainer]\nresume_mode = "latest"\n[slurm]\ncrash_budget = 3\n')
    (below / "outcomes").mkdir()
    commit.write_json(below / "elements.json", [str(run.path)])
    report_outcome(Run(below), open_attempt(Run(below), "7.0", ["n1"]).number, "done", "finished", "agent-0")
    command = [sys.executable, "-m", "hpcrl.launch.requeue.epilogue", str(run.path / "elements.json"), "0"]
    with ExitStack() as filesystem:
        filesystem.enter_context(view(below, run.path, Behaviour(errors={"READ": ("EIO", 1.0)})))
        with subprocess.Popen(
            command, env={**os.environ, "SLURM_JOB_ID": "7"}, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(2.5)
                with view(below, run.path, Behaviour()):
                    assert process.communicate(timeout=20)[0] == "attempt 1: done: finished\n"
            finally:
                process.kill()
    assert process.returncode == 0


def test_tensorboard_goes_on_after_the_filesystem_was_away(below: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(below.with_name("reader"))
    with MetricsWriter(Run(below), "trainer", 1, 0) as metrics:
        metrics.write(1, {"policy/loss": 1.0})
    with ExitStack() as follows:
        with view(below, run.path, Behaviour(errors={"OPEN": ("EIO", 1.0)})) as counts:
            follows.enter_context(Follower(run, 0.05))
            with MetricsWriter(Run(below), "trainer", 1, 1) as metrics:  # it looks at metrics of its own attempt alone
                metrics.write(2, {"policy/loss": 2.0})
            deadline, said = time.monotonic() + 60, ""  # it imports TensorBoard first
            while said.count("could not be written") < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
                said += capsys.readouterr().out
        with view(below, run.path, Behaviour()):
            follows.close()
    assert counts["OPEN"] > 1
    assert [path for path in Run(below).tensorboard.glob("*/events.*") if b"policy/loss" in path.read_bytes()]


FOLLOWS = """
import sys, time
from pathlib import Path
from hpcrl.rundir.layout import Run
from hpcrl.runtime import signals
signals._LOOK_S = 0.05
stop = signals.StopSignal()
while not Path(sys.argv[1], "control").exists():
    time.sleep(0.05)
stop.has_progress = True
stop.follow(Run(Path(sys.argv[1])), 3, "trainer", speaks=True)
while not stop.seen:
    time.sleep(0.05)
sys.exit(7)
"""


def test_weights_that_are_published_while_another_node_looks(nodes: tuple[Run, Run]) -> None:
    writer, reader = nodes
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(fetch, reader.weights_of(1), None, 20.0)
        time.sleep(0.5)
        directory = commit.begin(writer.weights_of(1), 1)
        save_tensors({"a": torch.ones(10)}, directory / "model-00001.safetensors")
        commit.finish(writer.weights_of(1), 1, version=1, tensors={"a": "0"})
        assert fetched.result(5).version == 1


def test_code_whose_folder_cannot_be_listed_is_not_taken_for_changed(below: Path) -> None:
    run = Run(below / "run")
    (run.code / "jobs").mkdir(parents=True)
    (run.code / "jobs" / "train.py").write_text("print()")
    run.config.write_text("")
    note_checksums(run, {})
    assert changed_files(run) == []
    place = below.with_name("reader")
    with view(below, place, Behaviour(errors={"OPENDIR": ("EIO", 1.0)})), pytest.raises(OSError, match="Input/output"):
        changed_files(Run(place / "run"))
