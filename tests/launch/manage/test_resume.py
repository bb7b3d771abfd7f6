"""`hpcrl resume` with settings, on run directories as `hpcrl submit` makes them; stand-ins for Slurm's programs note or refuse."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.errors import ConfigError, DataError, RunError, SubmitError
from hpcrl.launch.manage.registry import states_of
from hpcrl.launch.manage.resume import resume
from hpcrl.launch.submit.submit import prepare, submit
from hpcrl.rundir.checkpoints import FACTS, require_checkpoints
from hpcrl.rundir.checksums import changed_files, note_checksums, require_unchanged
from hpcrl.rundir.commit import begin, committed_directory, discard, finish, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Kind, open_attempt, report_outcome
from hpcrl.rundir.starts import note
from tests.filesystem.small import fill, small_filesystem
from tests.paths import QUICKSTART


@pytest.fixture
def bin_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with a squeue that knows no job."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    program(folder, "squeue", "true")
    program(folder, "srun", "true")
    return folder


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def ended(tmp_path: Path, *overrides: str, kind: Kind = "failed") -> Run:
    """Return a run of Slurm whose first attempt has ended."""
    root = tmp_path / "runs"
    config = Config.from_toml([QUICKSTART], [f"slurm.root={root}", *overrides])
    run = Run(root / "quickstart" / "mine")
    folder = root / "quickstart" / ".slurm" / "mine"
    folder.mkdir(parents=True)
    write_text(run.config, config.to_toml())
    run.slurm.symlink_to("../.slurm/mine")
    write_json(
        run.submission,
        {"executor": "slurm", "host": "h", "job_id": "7_0", "overrides": ["trainer.seed=42"], "submitted": 1.0},
    )
    open_attempt(run, "7_0.0", ["n1"])
    note(run, {"attempt": 1, "from": None})
    report_outcome(run, 1, kind, "why", "agent-0")
    return run


def checkpoint(run: Run, step: int) -> None:
    begin(run.checkpoint(step), 1)
    finish(run.checkpoint(step), 1, step=step)


def contents(run: Run) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.path.parent.rglob("*")) if path.is_file()}


def test_without_sbatch_nothing_is_changed(
    tmp_path: Path, bin_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path)
    before = contents(run)
    monkeypatch.setenv("PATH", str(bin_path))
    assert main(["resume", str(run.path), "trainer.max_steps=40"]) == SubmitError.exit_code
    assert capsys.readouterr().err.endswith(
        "hpcrl: sbatch was not found: ask for runs of Slurm on a node of its cluster\n"
    )
    assert contents(run) == before


@pytest.mark.usefixtures("bin_path")
def test_all_refused_changes_are_told_and_nothing_happens(tmp_path: Path) -> None:
    run = ended(tmp_path)
    before = contents(run)
    with pytest.raises(ConfigError) as caught:
        resume(
            run,
            ["trainer.seed=1", "trainer.policy.model.path=/other", "trainer.ckpt_interval=3", "trainer.max_steps=40"],
        )
    lines = str(caught.value).splitlines()
    assert [line.partition(" -> ")[0] for line in lines[:4]] == [
        "refused: trainer.seed: 42",
        f'refused: trainer.policy.model.path: "{QUICKSTART.parent}/quickstart/model"',
        "warning: trainer.max_steps: 30",
        "harmless: trainer.ckpt_interval: 10",
    ]
    assert "mine was not changed" in lines[4]
    assert "trainer.resume_mode=from_path" in lines[4]
    assert contents(run) == before


def interrupted(run: Run, step: int, updates: int) -> None:
    """Commit a checkpoint inside a step, with what the trainer keeps of the settings."""
    settings = Config.from_toml([run.config]).trainer.batch_settings | {"algorithm.of_an_earlier_version": 1}
    with committed_directory(run.checkpoint(step, updates), 1, step=step) as directory:
        write_json(directory / FACTS, {"settings": settings})


def test_a_step_that_was_interrupted_is_not_given_up_silently(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path, kind="cancelled")
    program(bin_path, "sbatch", "echo Submitted batch job 9")
    checkpoint(run, 4)
    for updates in (1, 3):
        interrupted(run, 7, updates)
    before = contents(run)
    with pytest.raises(ConfigError) as caught:
        resume(run, ["trainer.algorithm.eps_clip_low=0.05", "trainer.update_epochs_per_batch=3"])
    for words in (
        "interrupted inside step 8",
        "trainer.algorithm.eps_clip_low 0.2, trainer.update_epochs_per_batch 1",
        "start again from s000004, without s000007u3 s000007u1",
        "hpcrl checkpoint rm mine s000007u3 s000007u1 --force",
    ):
        assert words in str(caught.value)
    teacher = ["enable=true", "self_teacher.model=policy", "top_k=4"]
    with pytest.raises(ConfigError, match=r"trainer\.distillation\.enable false, .*trainer\.distillation\.top_k 0"):
        resume(run, [f"trainer.distillation.{name}" for name in teacher])
    assert contents(run) == before
    resume(run, ["trainer.ckpt_interval=3"])
    for path in (run.checkpoint(7, 1), run.checkpoint(7, 3)):
        discard(path)
    resume(run, ["trainer.algorithm.eps_clip_low=0.05"])


@pytest.mark.usefixtures("bin_path")
@pytest.mark.parametrize(
    ("override", "error", "expected"),
    [
        ("trainer.epochs=x", ConfigError, "trainer.epochs: expected a whole number"),
        ('data.val_data=["/nowhere.parquet"]', DataError, "no file /nowhere.parquet"),
        ("trainer.max_steps=3", ConfigError, "has a checkpoint of step 4, beyond 3"),
        ("trainer.resume_mode=none", RunError, "never continues a checkpoint"),
    ],
)
def test_settings_that_cannot_work_change_nothing(
    tmp_path: Path, override: str, error: type[Exception], expected: str
) -> None:
    run = ended(tmp_path)
    checkpoint(run, 4)
    before = contents(run)
    with pytest.raises(error, match=expected):
        resume(run, [override])
    assert contents(run) == before


def test_changed_configuration_takes_effect_and_the_old_one_is_kept(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path)
    original = run.config.read_text()
    program(bin_path, "sbatch", f'cp "$1" {tmp_path}/script; echo Submitted batch job 9')
    found = resume(run, ["trainer.ckpt_interval=3", "slurm.time_minutes=90", "trainer.placement.policy_num_nodes=2"])
    assert [(change.kind, change.difference.path) for change in found] == [
        ("warning", "trainer.placement.policy_num_nodes"),
        ("harmless", "trainer.ckpt_interval"),
        ("harmless", "slurm.time_minutes"),
    ]
    assert run.config_of(1).read_text() == original
    config = Config.from_toml([run.config])
    assert (config.trainer.ckpt_interval, config.slurm.time_minutes) == (3, 90)
    script = (tmp_path / "script").read_text()
    assert "--time=90" in script
    assert "--nodes=3" in script, "the plan is made anew"
    record = json.loads(run.submission.read_text())
    assert record["job_id"] == "9_0"
    assert record["overrides"][0] == "trainer.seed=42"
    assert "trainer.ckpt_interval=3" in record["overrides"]

    resume(run, ["trainer.ckpt_interval=4"])
    assert run.config_of(1).read_text() == original, "what attempt 1 used, not what no attempt used"


def test_without_settings_nothing_is_rewritten(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path)
    program(bin_path, "sbatch", "echo Submitted batch job 9")
    original = run.config.read_text()
    assert resume(run) == []
    assert run.config.read_text() == original
    assert not run.config_of(1).exists()


def test_refused_job_leaves_the_old_configuration(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path)
    program(bin_path, "sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    original = run.config.read_text()
    with pytest.raises(SubmitError, match="no such partition"):
        resume(run, ["slurm.partition=nope"])
    assert run.config.read_text() == original
    assert not run.config_of(1).exists()


def test_on_a_full_disk_nothing_changes_and_the_remedy_helps(
    tmp_path: Path, bin_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(bin_path, "sbatch", "echo Submitted batch job 9")
    with small_filesystem(tmp_path / "runs", "2m") as mounted:
        if not mounted:
            pytest.skip("no filesystem can be mounted here")
        run, command = ended(tmp_path), ["resume", "trainer.max_ckpts_to_keep=2"]
        for step in (1, 2, 3):
            checkpoint(run, step)
            (run.checkpoint(step) / "tensors").write_bytes(bytes(100_000))
        fill(run.path)
        before = contents(run)
        assert main([*command[:1], str(run.path), *command[1:]]) == 1
        said = capsys.readouterr().err
        assert f"hpcrl: {run.config_of(1)}: No space left on device; make room (`hpcrl status --size`" in said
        assert contents(run) == before
        assert main(["checkpoint", "rm", str(run.path), "1"]) == 0
        assert main([*command[:1], str(run.path), *command[1:]]) == 0
        assert Config.from_toml([run.config]).trainer.max_ckpts_to_keep == 2


def test_run_that_never_continues(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path, "trainer.resume_mode=none", kind="interrupted")
    with pytest.raises(RunError, match=r"submit a new run, or resume this one with trainer\.resume_mode=latest"):
        resume(run)
    program(bin_path, "sbatch", f'cp "$1" {tmp_path}/script; echo Submitted batch job 9')
    (change,) = resume(run, ["trainer.resume_mode=latest"])
    assert change.kind == "warning"
    assert "#SBATCH --requeue" in (tmp_path / "script").read_text()


def test_what_a_resume_changed_that_was_killed_is_told_by_the_next_one(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path)
    original = run.config.read_text()
    program(bin_path, "sbatch", "kill -9 $PPID")
    command = [sys.executable, "-m", "hpcrl.cli.main", "resume", str(run.path), "trainer.ckpt_interval=3"]
    assert subprocess.run(command, check=False).returncode == -9
    program(bin_path, "sbatch", "echo Submitted batch job 9")
    assert [change.difference.path for change in resume(run)] == ["trainer.ckpt_interval"]
    assert Config.from_toml([run.config]).trainer.ckpt_interval == 3
    assert run.config_of(1).read_text() == original

    assert resume(run, ["trainer.ckpt_interval=10"]) == [], "as attempt 1 had it"
    assert Config.from_toml([run.config]).trainer.ckpt_interval == 10


def test_one_resume_at_a_time(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path)
    program(bin_path, "sbatch", "echo Submitted batch job 9")
    with run.submission.open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="is being resumed by another"):
            resume(run)
    resume(run)


@pytest.mark.usefixtures("bin_path")
def test_a_submission_that_was_cut_short_cannot_be_resumed(tmp_path: Path) -> None:
    run = ended(tmp_path)
    run.submission.unlink()
    run.attempts.unlink()
    run.outcome(1).unlink()
    with pytest.raises(RunError, match="submission of mine was cut short"):
        resume(run)
    assert states_of([run])[0].detail == "its submission was cut short; submit it again under another name"


def test_a_job_that_cannot_be_recorded_is_cancelled(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path)
    original = run.config.read_text()
    # the file to be replaced is a directory when the job is there
    program(bin_path, "sbatch", f"rm {run.submission}; mkdir {run.submission}; echo Submitted batch job 9")
    program(bin_path, "scancel", f'echo "$@" > {tmp_path}/cancelled')
    with pytest.raises(OSError, match="no regular file"):
        resume(run, ["trainer.ckpt_interval=3"])
    assert (tmp_path / "cancelled").read_text() == "9_0\n"
    assert run.config.read_text() == original


def test_modules_of_ones_own_may_have_moved(tmp_path: Path, bin_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = tmp_path / "here" / "moved_config.py"
    write_text(module, "from hpcrl.config import Config\n\nclass Mine(Config):\n    pass\n")
    run = ended(tmp_path, "config_class=moved_config:Mine", f'python_path=["{module.parent}"]')
    module.parent.rename(tmp_path / "there")
    del sys.modules["moved_config"]
    sys.path.remove(str(module.parent))
    with pytest.raises(ConfigError, match="No module named 'moved_config'"):
        resume(run)
    program(bin_path, "sbatch", "echo Submitted batch job 9")
    (change,) = resume(run, [f'python_path=["{tmp_path}/there"]'])
    assert change.difference.path == "python_path"


def test_the_checkpoint_that_it_once_started_from_is_no_longer_needed(tmp_path: Path, bin_path: Path) -> None:
    gone = tmp_path / "other" / "checkpoints" / "s000002"
    run = ended(tmp_path, "trainer.resume_mode=from_path", f"trainer.resume_path={gone}")
    checkpoint(run, 4)
    program(bin_path, "sbatch", "echo Submitted batch job 9")
    (change,) = resume(run, ["trainer.ckpt_interval=3"])
    assert change.kind == "harmless"


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(
    tmp_path: Path, bin_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path)
    checkpoint(run, 3)
    open_attempt(run, "7_0.1", ["n1"])
    report_outcome(run, 2, "interrupted", "saved", "agent-0")
    require_checkpoints(run)
    shutil.copytree(run.checkpoints, tmp_path / "copy")
    shutil.rmtree(run.checkpoints)
    program(bin_path, "squeue", "exit 0")
    before = contents(run)
    with pytest.raises(
        DataError, match=r"mine had a checkpoint of step 3, and .*/checkpoints holds none any more.* backup"
    ):
        resume(run)
    assert contents(run) == before
    shutil.copytree(tmp_path / "copy", run.checkpoints)
    require_checkpoints(run)
    assert main(["checkpoint", "rm", str(run.path), "3", "--force"]) == 0
    assert "deleted s000003" in capsys.readouterr().out
    require_checkpoints(run)  # by hpcrl's own command it may


def test_code_that_was_edited_since_is_told_and_noted(
    tmp_path: Path, bin_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path)
    write_text(run.code / "jobs" / "train.py", "print('as submitted')")
    note_checksums(run, {})
    write_text(run.code / "jobs" / "train.py", "print('edited')")
    assert changed_files(run) == ["code/jobs/train.py was changed"]
    noted = run.checksums.read_text()
    run.checksums.write_text("[")
    assert changed_files(run) == ["checksums.json is damaged"]
    run.checksums.write_text(noted)
    program(bin_path, "sbatch", "echo Submitted batch job 8")
    resume(run)
    assert (
        "mine: code/jobs/train.py was changed; the next attempt begins with the files as they are"
        in capsys.readouterr().err
    )
    assert changed_files(run) == []


def test_who_compares_many_files_can_show_meanwhile_that_it_goes_on(tmp_path: Path) -> None:
    run = ended(tmp_path)
    for number in range(30):
        write_text(run.code / "jobs" / f"part{number}.py", str(number))
    note_checksums(run, {})
    shown = list[None]()
    require_unchanged(run, lambda: shown.append(None))
    assert len(shown) >= 60  # each file when it is found, and when it was read


def test_a_configuration_whose_submission_fails_is_noted_as_it_was(tmp_path: Path, bin_path: Path) -> None:
    run = ended(tmp_path)
    note_checksums(run, {})
    program(bin_path, "sbatch", "echo sbatch: error: no >&2; exit 1")
    with pytest.raises(SubmitError):
        resume(run, ["trainer.ckpt_interval=3"])
    assert changed_files(run) == []


@pytest.mark.usefixtures("bin_path")
def test_own_modules_that_were_edited_since_are_refused_told_and_noted(
    tmp_path: Path, bin_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study"
    write_text(study / "own_task.py", "from own_tools import scale\nclass Mine: init = step = close = print\n")
    write_text(study / "own_tools.py", "scale = 1\n")
    write_text(study / "own_other.py", "")
    settings = [f"slurm.root={tmp_path}/runs", f'python_path=["{study}"]', "environment.env_class=own_task:Mine"]
    program(bin_path, "sbatch", "echo Submitted batch job 7")
    submission = prepare("mine", [(Config.from_toml([QUICKSTART], settings), [])])
    (run,) = submit(submission, local=False)
    write_text(study / "own_other.py", "what no setting names, nor what one names imports")
    require_unchanged(run)
    assert changed_files(run) == []
    write_text(study / "own_tools.py", "scale = 2\n")
    told = f"{study}/own_tools.py was changed"
    with pytest.raises(
        DataError, match=f"^{told}, since mine was submitted or resumed. Put it back, or `hpcrl resume mine`"
    ):
        require_unchanged(run)
    assert main(["verify", str(run.path)]) == DataError.exit_code
    assert told in capsys.readouterr().out

    study.rename(tmp_path / "elsewhere")
    require_unchanged(run)  # as in a container that has the modules itself
    assert changed_files(run) == [f"{study}, from which it imports, is missing"]
    (tmp_path / "elsewhere").rename(study)
    program(bin_path, "sbatch", "echo sbatch: error: no >&2; exit 1")
    with pytest.raises(SubmitError):
        resume(run)
    assert changed_files(run) == [told]
    (study / "own_task.py").rename(study / "own_task.txt")
    program(bin_path, "sbatch", "echo Submitted batch job 8")
    capsys.readouterr()
    resume(run)
    said = capsys.readouterr().err
    assert f"mine: {told}; the next attempt begins with the files as they are" in said
    assert f"{study}/own_task.py is missing" in said
    assert changed_files(run) == []


def test_a_run_of_an_earlier_version_has_no_checksums_of_its_own_checksums(tmp_path: Path) -> None:
    run = ended(tmp_path)
    note_checksums(run, {str(tmp_path): ["runs/quickstart/mine/config.toml"]})
    noted = json.loads(run.checksums.read_text())
    run.checksums.write_text(json.dumps(noted | {"config.toml": "0" * 32}))
    assert changed_files(run) == ["checksums.json is damaged"]
    run.checksums.write_text(json.dumps({"config.toml": noted["config.toml"]}))
    assert changed_files(run) == []
