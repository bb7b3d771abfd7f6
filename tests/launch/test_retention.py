"""What a run keeps after its end: nothing that a resume, an upload or another run needs is deleted, whenever a kill comes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from hpcrl import faults
from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.sections.upload import UploadConfig
from hpcrl.errors import CommitError, ConfigError, RunError
from hpcrl.launch.retention import Kept, end_of_run, shrink, uses_of
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.checkpoints import Retention, require_checkpoints, samples_removed
from hpcrl.rundir.commit import children, committed, committed_directory, verify, write_text
from hpcrl.rundir.layout import Run, step_of, version_of
from hpcrl.rundir.ledger import open_attempt
from hpcrl.rundir.starts import note
from tests.launch.manage.test_verify import export
from tests.upload.material import end, made_run, write_checkpoint, write_export

UPLOAD = UploadConfig()
BEST = Retention(3, metric="reward/avg_raw_reward")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that is done after 6 steps, of which step 2 was the best, with an export of steps 4 and 6."""
    run = made_run(tmp_path, [])
    note(run, {"attempt": 1, "from": None})
    for step in (2, 4, 6):
        write_checkpoint(run, step)
    for step in (4, 6):
        write_export(run, step)
        with committed_directory(run.weights_of(step), 1) as directory:
            write_text(directory / "model.safetensors", "x")
    write_text(run.dataset("train-0") / "tokens", "x")
    write_text(run.samples_of(0) / "g1.safetensors", "x")
    write_text(run.checkpoints / ".tmp-s000008.1" / "part", "x")
    write_text(run.checkpoints / ".quarantined-s000001.1" / "part", "x")
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        for step in range(1, 7):
            writer.write(step, {BEST.metric or "": 1.0 if step == 2 else 0.5})
    end(run)
    return run


def test_a_checkpoint_stays_where_the_weights_of_its_export_are_damaged(run: Run) -> None:
    shutil.rmtree(run.export(6))
    with (export(run, 6) / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CommitError, match=r"holds other tensors than were exported.*nothing was deleted"):
        delete(run, "export", Retention())
    assert "s000006" in left(run)


def delete(run: Run, keep: Kept, retention: Retention = BEST, upload: UploadConfig = UPLOAD) -> list[str]:
    return [path.name for path in shrink(run, keep, retention, upload)]


def left(run: Run) -> list[str]:
    return sorted(name for name in children(run.checkpoints) if name != "starts.jsonl")


@pytest.mark.parametrize(
    ("keep", "retention", "stay"),
    [
        ("last", BEST, ["s000002", "s000006"]),
        ("last", Retention(3, every=4), ["s000004", "s000006"]),
        ("last", Retention(), ["s000006"]),
        ("export", BEST, ["s000002"]),
        ("export", Retention(), []),
    ],
)
def test_what_stays(run: Run, keep: Kept, retention: Retention, stay: list[str]) -> None:
    assert {"weights", "dataset"} < {*delete(run, keep, retention)}
    assert left(run) == [".quarantined-s000001.1", *stay]
    assert committed(run.exports, step_of) == [4, 6]
    assert (run.samples_of(0) / "g1.safetensors").exists()
    assert not run.weights.exists()
    assert samples_removed(run) == 6, "verify looks for no samples of trained steps"
    if stay:
        require_checkpoints(run)
    else:
        with pytest.raises(RunError, match=rf"submit a new run .* trainer.policy.model.path={run.export(6)}"):
            require_checkpoints(run)
    assert delete(run, keep, retention) == []


def test_what_a_job_has_yet_to_evaluate_stays(run: Run) -> None:
    """Weights, and where scores of evaluations choose, the checkpoint too; a later call deletes them."""
    by_score = Retention(3, metric="eval/all/avg_score")
    write_text(run.eval_begun(4), json.dumps({"version": 4, "attempt": 1}))
    assert "weights" not in delete(run, "last", by_score)
    assert left(run) == [".quarantined-s000001.1", "s000004", "s000006"]
    assert committed(run.weights, version_of) == [4, 6]
    write_text(run.eval_summary(4), "{}")
    assert "weights" in delete(run, "last", by_score)


def test_a_last_checkpoint_without_export_stays(run: Run) -> None:
    (run.export(6) / "COMMIT").unlink()
    delete(run, "export")
    assert committed(run.checkpoints, step_of) == [2, 6]


@pytest.mark.parametrize("keep", ["last", "export"])
def test_nothing_is_deleted_beside_a_damaged_file(run: Run, keep: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    kept = run.checkpoint(6) / "policy" / "__0_0.distcp" if keep == "last" else run.export(6) / "tokenizer.json"
    size = kept.stat().st_size
    kept.write_bytes(b"y" * size)
    before = left(run)
    with pytest.raises(CommitError, match="checksum differs from the manifest; nothing was deleted"):
        delete(run, keep)
    end_of_run(run, keep, BEST, UPLOAD, 1)
    assert "nothing was deleted; `hpcrl rm sorting --keep`" in capsys.readouterr().out
    assert left(run) == before
    assert run.weights.exists()


@pytest.mark.parametrize("step", [2, 4, 6])
def test_each_export_that_replaces_a_checkpoint_is_verified_first(run: Run, step: int) -> None:
    if step == 2:
        write_export(run, 2)
    (run.export(step) / "tokenizer.json").write_bytes(b"y")
    before = left(run)
    with pytest.raises(CommitError, match="nothing was deleted"):
        delete(run, "export", Retention(3, every=4, metric=BEST.metric))
    assert left(run) == before


def test_an_export_of_a_training_that_was_given_up_replaces_no_checkpoint(run: Run) -> None:
    note(run, {"attempt": 2, "from": "s000004"})
    write_checkpoint(run, 6, attempt=2)
    delete(run, "export")
    assert committed(run.checkpoints, step_of) == [2, 6]
    write_export(run, 2, attempt=0)
    delete(run, "export")
    assert committed(run.checkpoints, step_of) == [6], "`hpcrl checkpoint export` has written step 2"


def test_weights_of_steps_after_the_last_checkpoint_stay(run: Run) -> None:
    with committed_directory(run.weights_of(7), 1) as directory:
        write_text(directory / "model.safetensors", "x")
    assert "weights" not in delete(run, "last")
    write_export(run, 7)
    assert delete(run, "last") == ["weights"]


def test_a_newer_attempt_keeps_its_files(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    open_attempt(run, "local-2", ["here"])
    end_of_run(run, "last", BEST, UPLOAD, 1)
    assert "attempt 2" in capsys.readouterr().out
    assert committed(run.checkpoints, step_of) == [2, 4, 6]
    assert run.weights.exists()


def test_weights_that_nothing_else_has_stay(run: Run) -> None:
    for step in (2, 4, 6):
        (run.checkpoint(step) / "COMMIT").unlink()
    (run.export(6) / "COMMIT").unlink()
    with pytest.raises(RunError, match="neither a checkpoint nor an export of step 6"):
        delete(run, "last")
    write_checkpoint(run, 6).rename(run.checkpoints / "s000006u1")
    with pytest.raises(RunError, match="interrupted inside step 7"):
        delete(run, "last")


def test_a_kill_leaves_whole_checkpoints_and_the_rest_goes_later(run: Run) -> None:
    kills = 0
    while True:
        child = os.fork()
        if child == 0:
            faults._passed.clear()
            os.environ["HPCRL_FAULT"] = "commit.trash:kill"
            delete(run, "last")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert verify(run.checkpoint(6))
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
    assert kills == 4, "in each of half-written, step 4, weights and dataset"
    delete(run, "last")
    assert left(run) == [".quarantined-s000001.1", "s000002", "s000006"]
    assert not [path for path in run.path.iterdir() if "weights" in path.name or "dataset" in path.name]


def test_uploads_and_other_runs_keep_what_they_need(run: Run, tmp_path: Path) -> None:
    upload = UploadConfig(s3="all", s3_bucket="mine")
    delete(run, "export", upload=upload)
    assert committed(run.checkpoints, step_of) == [2, 4, 6], "no store has them yet"
    other = made_run(
        tmp_path, ["trainer.resume_mode=from_path", f"trainer.resume_path={run.checkpoint(4)}"], name="other"
    )
    delete(run, "last")
    assert committed(run.checkpoints, step_of) == [2, 4, 6], "the other run has not begun"
    write_checkpoint(other, 5)
    delete(run, "last")
    assert committed(run.checkpoints, step_of) == [2, 6]


def test_rm_refuses_what_another_run_names(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"executor": "local", "host": os.uname().nodename, "job_id": "1", "overrides": [], "submitted": 1.0}
    write_text(run.submission, json.dumps(record))
    other = made_run(tmp_path, [f"trainer.policy.model.path={run.export(6)}"], name="other")
    assert uses_of(run) == [(other, run.export(6))]
    assert main(["rm", str(run.path), "--yes"]) == RunError.exit_code
    assert f"the configuration of {other.path} names {run.export(6)}; remove that run first" in capsys.readouterr().err
    assert main(["rm", str(run.path), "--yes", "--keep", "last"]) == 0
    assert capsys.readouterr().out.startswith(f"removed {run.path}, ")
    assert committed(run.checkpoints, step_of) == [6]
    end(other)
    assert main(["rm", str(run.path), "--yes", "--keep", "metrics"]) == 0
    with pytest.raises(RunError, match="keeps no checkpoint since its end"):
        require_checkpoints(run)
    assert main(["rm", str(run.path), "--yes"]) == 0
    assert not run.path.exists()


def test_a_path_through_a_link_is_one_of_the_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.root)
    through = Run(tmp_path / "link" / run.project / run.name)
    other = made_run(tmp_path, [f"trainer.policy.model.path={through.export(6)}"], name="other")
    assert uses_of(run) == [(other, run.export(6))]
    assert [path for _, path in uses_of(through)] == [through.export(6)]


def test_a_pipe_in_the_place_of_a_configuration_blocks_nothing(run: Run) -> None:
    pipe = run.root / "theirs" / "run" / "config.toml"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    signal.alarm(60)
    try:
        assert uses_of(run) == []
    finally:
        signal.alarm(0)


def test_settings_that_keep_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set trainer\.hf_save_interval"):
        made_run(tmp_path, ["trainer.keep_when_done=export", "trainer.hf_save_interval=-1"])
    assert Config.from_toml([made_run(tmp_path, ["trainer.keep_when_done=export"]).config])
