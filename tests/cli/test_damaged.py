"""What commands say of a run with a damaged file: which file and what to do, and of other runs what they always say."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from hpcrl.cli.main import COMMANDS, main
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.commit import begin, finish, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, read_attempts, report_outcome
from hpcrl.rundir.records import append_text, with_checksum
from hpcrl.rundir.starts import note
from hpcrl.runtime.process_status import StatusWriter
from tests.paths import QUICKSTART

DEEP = "[" * 100_000
CONTENTS = ["", "{", "[1]", "7", '"x"', "null", '{"attempt": "x", "number": [], "kind": {}}', "\x1b\udcff", DEEP]
FILES = [
    "submission.json", "outcomes/1.json", "config.toml", "attempts.jsonl", "endpoints/trainer.json", "metrics/trainer.jsonl",
    "checkpoints/starts.jsonl", "checkpoints/s000001/COMMIT", "control/stop.json", "outcomes/notes.txt", "outcomes/notes.json", "metrics/notes.jsonl", "endpoints/notes.json",
    "batches/s000001.json", "uploads/s3.json", "allocations/local-1.json",
]  # fmt: skip
SAMPLE = {
    "prompt": [{"role": "user", "content": "x"}],
    "data_source": "d",
    "response": "y",
    "score": 1.0,
    "stop_reason": "stop",
    "env_metrics": {},
    "group_id": "g",
    "sample": 0,
    "parts": [{"by": "prompt", "text": "x", "tokens": 1}, {"by": "policy", "text": "y", "tokens": 2}],
}
ODD_SAMPLES = [
    json.dumps(SAMPLE | odd)
    for odd in (
        {"prompt": [1]},
        {"prompt": [{"role": "user"}]},
        {"response": 7},
        {"response": [1]},
        {"score": True},
        {"env_metrics": {"a": "x"}},
        {"parts": [1]},
        {"parts": [{"by": "policy", "text": "y", "tokens": "2"}]},
        {"sample": float("inf")},
    )
]
OF_ONE_RUN = {
    "rm": [],
    "status": (), "follow": (), "logs": (), "stacks": (), "cancel": (), "requeue": (), "resume": ("trainer.seed=1",), "samples": (), "tensorboard": ("--rebuild",),
    "attach": ("--", "true"), "profile": ("--seconds", "1"), "replay": ("--step", "1"), "checkpoint ls": (), "checkpoint verify": (), "verify": (), "certify": (), "trace": (), "advise": (), "goodput": (), "report": (), "compare": ("good",), "rescore": (), "sync": ("--to", "console"),
    "upload": ("--to", "s3", "--bucket", "mine"), "bench report": (),
}  # fmt: skip
"""Commands that name a run, each with the arguments that follow its name; the seed is refused, so that nothing starts."""


def made(root: Path, name: str) -> Run:
    """Return a run of this machine that has failed after its first step."""
    run = Run(root / "p" / name)
    write_text(run.config, QUICKSTART.read_text())
    run.slurm.symlink_to(f"../.slurm/{name}")
    record = {"executor": "local", "host": socket.gethostname(), "job_id": "1", "overrides": [], "submitted": 1.0}
    write_json(run.submission, record)
    open_attempt(run, "local-1", ["n1"])
    StatusWriter(run, "trainer", 1).write("step 1/40", step=1, total=40)
    note(run, {"attempt": 1, "from": None})
    begin(run.checkpoint(1), 1)
    finish(run.checkpoint(1), 1, step=1)
    report_outcome(run, 1, "failed", "out of memory", "agent-0")
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        writer.write(1, {"timing/step": 1.0})
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    made(root, "good")
    made(root, "bad")
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path


def damage(run: Run, name: str, content: str) -> None:
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode(errors="surrogateescape"))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("name", FILES)
def test_status_of_the_others_stays(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = said(capsys, "status", "good", "--root", str(root))[1]
    for content in CONTENTS:
        damage(Run(root / "p" / "bad"), name, content)
        code, text = said(capsys, "status", "--root", str(root))
        assert (code, len(text.splitlines())) == (0, 2), content[:50]
        assert "p/good" in text, content[:50]
        assert "failed" in text, content[:50]
        assert said(capsys, "status", "good", "--root", str(root)) == (0, before), content[:50]
        code, text = said(capsys, "status", "--json", "--root", str(root))
        assert [value["run"] for value in json.loads(text)] == ["bad", "good"], content[:50]


@pytest.mark.parametrize("command", OF_ONE_RUN)
@pytest.mark.parametrize("name", FILES)
def test_no_command_ends_with_a_traceback(
    root: Path, name: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(root))  # without Slurm's programs
    monkeypatch.chdir(root)
    for content in ("[1]", DEEP):
        damage(Run(root / "p" / "bad"), name, content)
        code, text = said(capsys, *command.split(), "bad", "--root", str(root), *OF_ONE_RUN[command])
        assert text
        assert "Traceback" not in text
        if command == "resume" and name in ("submission.json", "outcomes/1.json", "attempts.jsonl", "config.toml"):
            assert code != 0
            assert str(root / "p" / "bad" / name) in text


@pytest.mark.parametrize(
    ("name", "contents", "commands"),
    [
        ("committed.json", ['{"step": "1"}', "[1]"], ["verify bad"]),
        ("trackers/console.json", ["[1]", '{"name": 1}', DEEP], ["sync bad --to console"]),
        ("evaluation.json", ["[1]", "{", DEEP, '{"root": 1}'], ["rescore bad"]),
        ("evals/v000001/0.jsonl", ODD_SAMPLES, ["rescore bad", "compare bad bad", "samples bad --eval"]),
    ],
)
def test_what_few_commands_read(
    root: Path, name: str, contents: list[str], commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(root / "p" / "bad")
    append_text(run.eval_dump(1, 0), json.dumps(SAMPLE) + "\n")
    append_text(run.eval_dump(1, 0).with_name("copy.jsonl"), json.dumps(SAMPLE) + "\n")
    assert said(capsys, "samples", "bad", "--eval", "--root", str(root))[0] == 0, "another file beside them is no dump"
    for content in contents:
        damage(run, name, content)
        for command in commands:
            code, text = said(capsys, *command.split(), "--root", str(root))
            assert str(run.path / name) in text, (content[:50], text)
            assert code, content[:50]


def test_all_commands_that_name_a_run_are_tried() -> None:
    tried = {command.split()[0] for command in OF_ONE_RUN}
    assert {name for group in COMMANDS.values() for name in group} - tried == {
        "init", "submit", "plan", "score", "eval", "config", "data", "env", "doctor", "reward", "engine", "completion", "image", "trial",
    }  # fmt: skip


@pytest.mark.parametrize("left", ["outcomes/1.json", "checkpoints", "logs/1"])
def test_a_run_that_lost_the_list_of_its_attempts_does_not_begin_under_an_old_number(
    root: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was resumed, found its own old outcome, and ended at once as if that were its own."""
    run = Run(root / "p" / "bad")
    run.logs(1).mkdir(parents=True)
    for other in {"outcomes/1.json", "checkpoints", "logs/1"} - {left}:
        (run.path / other).rename(root / other.replace("/", "-"))
    run.attempts.unlink()
    code, text = said(capsys, "resume", "bad", "--root", str(root))
    assert code == 5
    assert f"{run.attempts} does not know attempt 1" in text
    (line,) = [part.partition("' >> ")[0] for part in text.split("echo '")[1:]]
    run.attempts.write_text(line + "\n")
    assert [attempt.number for attempt in read_attempts(run)] == [1]
    assert "does not know" not in said(capsys, "status", "bad", "--root", str(root))[1]
    assert open_attempt(run, "local-2", ["n1"]).number == 2


def test_what_a_later_version_adds_to_a_record_is_passed_over(root: Path) -> None:
    run = Run(root / "p" / "good")
    line = json.loads(run.attempts.read_text())
    del line["blake2b"]
    run.attempts.write_text(with_checksum({**line, "colour": "red"})[0] + "\n")
    assert [attempt.job for attempt in read_attempts(run)] == ["local-1"]


def test_a_damaged_status_file_does_not_end_its_process(root: Path) -> None:
    run = Run(root / "p" / "good")
    for content in CONTENTS:
        damage(run, "endpoints/trainer.json", content)
        StatusWriter(run, "trainer", 1).write("step 2/40")
        assert json.loads(run.status_file("trainer").read_text())["state"] == "step 2/40"
