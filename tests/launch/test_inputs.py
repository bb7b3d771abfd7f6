"""Datasets, chat templates and models that change between two attempts stop the next one, as the run's code and own modules do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.fields import settings
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.errors import DataError, SubmitError
from hpcrl.launch.inputs import DATASETS, FILES, MODELS, changed_inputs, require_same_inputs
from hpcrl.launch.manage.resume import resume
from hpcrl.rundir.checksums import note_checksums
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, read_outcome
from hpcrl.rundir.records import with_checksum
from tests.launch.manage.test_resume import ended, program
from tests.paths import CONFIGS

MODEL = CONFIGS / "quickstart" / "model"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
NO_INPUTS = {
    *("data.local_dir", "data.val_local_dir", "trainer.resume_path", "python_path", "slurm.root", "slurm.checkpoint_root", "slurm.export_root", "slurm.tensorboard_root", "slurm.container.image"),
    *("trainer.alerts.command", "trainer.alerts.webhook_file", "trainer.upload.hf_token_file", "trainer.upload.s3_credentials_file"),
    *("generator.inference_engine.remote_key_file", "generator.inference_engine.remote_ca_file", "generator.inference_engine.speculative.model"),
    *("environment.skyrl_gym.agent.service.token_file", "environment.skyrl_gym.agent.container.image"),
}  # fmt: skip
"""Settings of files and folders that decide nothing of what is trained, or that are compared in another way."""


def test_every_setting_of_a_file_is_compared_or_not_on_purpose() -> None:
    named = {setting.path for setting in settings(ConfigTree) if setting.location}
    assert named == {*DATASETS, *MODELS, *FILES, *NO_INPUTS}
    assert not NO_INPUTS & {*DATASETS, *MODELS, *FILES}


def write_rows(path: Path, count: int) -> None:
    rows = [{"prompt": f"sort: {chr(97 + number % 26)}b", "response": "ab"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with training and validation rows, a template and a model."""
    folder = tmp_path / "files"
    folder.mkdir()
    write_rows(folder / "train.jsonl", 30)
    write_rows(folder / "validation.jsonl", 9)
    (folder / "chat.jinja").write_text(TEMPLATE)
    shutil.copytree(MODEL, folder / "model")
    return folder


def names(files: Path) -> list[str]:
    return [
        f"data.train_data=[{files}/train.jsonl]",
        f"data.val_data=[{files}/validation.jsonl]",
        "trainer.eval_interval=2",
        "generator.chat_template.source=file",
        f"generator.chat_template.name_or_path={files}/chat.jinja",
        f"trainer.policy.model.path={files}/model",
    ]


def begin(run: Run) -> None:
    """Do what the first node's agent does before anything starts."""
    require_same_inputs(run, Config.from_toml([run.config]))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "rows are added": (
        lambda files: write_rows(files / "train.jsonl", 40),
        "train.jsonl (data.train_data) was changed",
    ),
    "validation": (
        lambda files: write_rows(files / "validation.jsonl", 8),
        "validation.jsonl (data.val_data) was changed",
    ),
    "template": (
        lambda files: (files / "chat.jinja").write_text("x" + TEMPLATE),
        "chat.jinja (generator.chat_template.name_or_path) was changed",
    ),
    "tokenizer": (
        lambda files: (files / "model" / "tokenizer_config.json").write_text("{}"),
        "model/tokenizer_config.json (trainer.policy.model.path) was changed",
    ),
    "a vocabulary": (
        lambda files: (files / "model" / "vocab.json").write_text("{}"),
        "model/vocab.json (trainer.policy.model.path) is new",
    ),
    "weights": (
        lambda files: (files / "model" / "model.safetensors").unlink(),
        "model/model.safetensors (trainer.policy.model.path) is missing",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_attempts_stops_the_next_one(
    change: str, tmp_path: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path, *names(files))
    note_checksums(run, {})
    begin(run)
    begin(run)
    assert main(["verify", str(run.path)]) == 0
    act, became = CHANGES[change]
    act(files)
    with pytest.raises(DataError) as error:
        begin(run)
    assert str(error.value) == (
        f"{files}/{became}, since mine was submitted or resumed. Put it back, or `hpcrl resume mine` to go on with it as it is now"
    )
    capsys.readouterr()
    assert main(["verify", str(run.path)]) == DataError.exit_code
    shown = capsys.readouterr().out
    assert "datasets, templates and models that it reads: 1 damaged: put them back, or `hpcrl resume`" in shown
    assert f"{files}/{became}" in shown


def test_who_resumes_a_run_goes_on_with_the_files_as_they_are(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, programs = ended(tmp_path, *names(files)), tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for name in ("squeue", "srun"):
        program(programs, name, "true")
    begin(run)
    write_rows(files / "train.jsonl", 40)
    became = f"{files}/train.jsonl (data.train_data) was changed"
    program(programs, "sbatch", "echo sbatch: error: no >&2; exit 1")
    with pytest.raises(SubmitError):
        resume(run)
    assert changed_inputs(run, Config.from_toml([run.config])) == [became], "nothing was resumed"
    program(programs, "sbatch", "echo Submitted batch job 8")
    capsys.readouterr()
    resume(run)
    assert f"mine: {became}; the next attempt begins with the files as they are" in capsys.readouterr().err
    begin(run)
    write_rows(files / "train.jsonl", 41)
    with pytest.raises(DataError, match="was changed"):
        begin(run)


def test_a_file_whose_status_is_the_same_is_read_by_verify_alone(tmp_path: Path, files: Path) -> None:
    run, train = ended(tmp_path, *names(files)), files / "train.jsonl"
    begin(run)
    config, status = Config.from_toml([run.config]), train.stat()
    os.utime(train, ns=(0, 0))
    assert changed_inputs(run, config) == [], "touched, with the same content"
    train.write_bytes(train.read_bytes().replace(b"sort", b"sate"))
    os.utime(train, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert changed_inputs(run, config) == [f"{train} (data.train_data) was changed"], "of the same size and time"
    noted = run.inputs.read_text()
    run.inputs.write_text(noted.replace("data.train", "data.drain"))
    assert changed_inputs(run, config) == ["inputs.json is damaged"]
    run.inputs.write_text(noted)
    now, record = train.stat(), json.loads(noted)["files"]
    record[str(train)]["status"] = [now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino]
    write_text(run.inputs, with_checksum({"files": record})[0])
    assert changed_inputs(run, config) == []
    assert changed_inputs(run, config, reread=True) == [f"{train} (data.train_data) was changed"]


def test_files_of_a_dataset_in_another_order_are_others(tmp_path: Path, files: Path) -> None:
    folder = files / "rows"
    folder.mkdir()
    for name in ("a", "b"):
        write_rows(folder / f"{name}.jsonl", 10)

    def name_files(text: str) -> None:
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: x\n  data_files: {text}\n---\n")

    name_files("[a.jsonl, b.jsonl]")
    run = ended(tmp_path, *names(files), f"data.train_data=[{folder}]")
    begin(run)
    name_files("[b.jsonl, a.jsonl]")
    with pytest.raises(DataError, match=f"the order of the files, from {folder}/b.jsonl on, was changed"):
        begin(run)


def test_large_weights_are_compared_by_parts(tmp_path: Path, files: Path) -> None:
    weights = files / "model" / "model.safetensors"
    os.truncate(weights, 200 << 20)
    run = ended(tmp_path, *names(files))
    begin(run)
    with weights.open("r+b") as file:
        file.seek(90 << 20)
        file.write(b"\1" * (4 << 20))
    with pytest.raises(DataError, match=r"model.safetensors \(trainer.policy.model.path\) was changed"):
        begin(run)


def test_rows_that_are_tokens_of_the_run_may_be_gone_and_not_others(tmp_path: Path, files: Path) -> None:
    run = ended(tmp_path)
    config = Config.from_toml(
        [CONFIGS / "sft_tiny.toml"], [*names(files), f"slurm.root={tmp_path}/runs", "data.format=prompt_response"]
    )
    write_text(run.config, config.to_toml())
    begin(run)
    (files / "train.jsonl").unlink()
    begin(run)
    write_rows(files / "train.jsonl", 31)
    with pytest.raises(DataError, match=r"train.jsonl \(data.train_data\) was changed"):
        begin(run)


def test_an_agent_begins_no_attempt_with_other_rows(tmp_path: Path, files: Path) -> None:
    run = ended(tmp_path, *names(files))
    begin(run)
    write_rows(files / "train.jsonl", 40)
    open_attempt(run, "local-2", ["here"])
    started = {"EXECUTOR": "local", "LOCAL_JOB_ID": "9", "LOCAL_NTASKS": "1", "LOCAL_GLOBALRANK": "0"}
    environment = {**os.environ, **{f"SUBMITIT_{name}": value for name, value in started.items()}}
    command = [sys.executable, "-c", f"from hpcrl.launch.agent.agent import main; main({str(run.path)!r})"]
    assert subprocess.run(command, env=environment, timeout=120, check=False).returncode == 1
    outcome = read_outcome(run)
    assert outcome
    assert outcome.kind == "failed"
    assert f"DataError: {files}/train.jsonl (data.train_data) was changed, since mine was submitted" in outcome.message


SNAPSHOT = "hub/datasets--owner--rows/snapshots"


def test_another_commit_of_the_hub_with_the_same_rows_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def commit(revision: str, count: int) -> None:
        folder = tmp_path / SNAPSHOT / revision
        folder.mkdir(parents=True)
        write_rows(folder / "train.jsonl", count)
        (folder / "README.md").write_text(f"commit {revision}")
        (folder.parents[1] / "refs").mkdir(exist_ok=True)
        (folder.parents[1] / "refs" / "main").write_text(revision)

    commit("a" * 40, 20)
    run = ended(tmp_path, "data.train_data=[owner/rows]", "data.val_data=[]", "trainer.eval_interval=0")
    begin(run)
    commit("b" * 40, 20)
    begin(run)
    commit("c" * 40, 21)
    with pytest.raises(DataError, match=r"^owner/rows/train.jsonl \(data.train_data\) was changed"):
        begin(run)
    shutil.rmtree(tmp_path / "hub")
    begin(run)  # this machine has not got it, so nothing is known of it
