"""`hpcrl checkpoint …`: what each command prints and deletes, and its exit code. Export is in tests/trainer/saving/test_committer.py."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.commit import begin, committed_directory, write_json
from hpcrl.rundir.layout import Run
from tests.paths import QUICKSTART

Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Checkpoints of steps 10 to 50; the one of step 20 has the best reward."""
    monkeypatch.setenv("HPCRL_ROOT", str(tmp_path))
    run = Run(tmp_path / "project" / "one")
    run.path.mkdir(parents=True)
    keeping = ["trainer.max_ckpts_to_keep=2", "trainer.ckpt_keep_every=30", "trainer.ckpt_keep_best=reward"]
    run.config.write_text(Config.from_toml([QUICKSTART], keeping).to_toml())
    write_json(run.submission, {"executor": "local", "host": socket.gethostname(), "job_id": "0"})
    for step in range(10, 60, 10):
        with committed_directory(run.checkpoint(step), 1, step=step) as directory:
            (directory / "model").write_bytes(bytes(2048))
    with MetricsWriter(run, "trainer", 1, 0) as metrics:
        for step in range(10, 60):
            metrics.write(step, {"reward": 1.5 if step == 20 else step / 100})
    return run


@pytest.fixture
def active(run: Run) -> Iterator[None]:
    """The run's job, as the local executor would have started it."""
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "submitit"])
    write_json(run.submission, {"executor": "local", "host": socket.gethostname(), "job_id": str(job.pid)})
    yield
    job.kill()
    job.wait()


def called(output: Output, *words: str) -> tuple[int, str, str]:
    code = main(["checkpoint", *words])
    return code, *output.readouterr()


def there(run: Run) -> list[str]:
    return sorted(os.listdir(run.checkpoints))


def test_ls(run: Run, capsys: Output) -> None:
    begin(run.checkpoint(60), 2)
    with committed_directory(run.checkpoint(50, 3), 2):
        pass
    (run.checkpoint(30) / "model").write_bytes(bytes(2047))
    for step, aside in ((10, ".quarantined-s000010.2"), (40, ".given-up-s000040.2")):
        run.checkpoint(step).rename(run.checkpoints / aside)
    (run.checkpoints / "s000070").mkdir()
    code, out, _ = called(capsys, "ls", "one")
    assert code == 0
    header, *rows = [" ".join(line.split()).split(maxsplit=1) for line in out.splitlines()]
    assert header == ["checkpoint", "state size age attempt kept because"]
    found = {name: re.sub(r"B \d+ s ", "B 0 s ", rest) for name, rest in rows}
    assert found == {
        ".given-up-s000040.2": "given up 2.2 KiB 0 s 1",
        ".quarantined-s000010.2": "quarantined 2.2 KiB 0 s 1",
        ".tmp-s000060.2": "half-written 0 B 0 s 2",
        "s000020": "committed 2.2 KiB 0 s 1 best reward: 1.5",
        "s000030": f"damaged 2.2 KiB 0 s 1 {run.checkpoint(30)}/model: expected 2048 bytes, found 2047",
        "s000050": "committed 2.2 KiB 0 s 1 newest 2",
        "s000050u3": found["s000050u3"],
        "s000070": "half-written 0 B 0 s -",
    }
    assert found["s000050u3"].startswith("partial ")
    assert found["s000050u3"].endswith(" 2 newest 2")


def test_ls_as_json(run: Run, capsys: Output) -> None:
    code, out, _ = called(capsys, "ls", "one", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [Path(row["path"]).name for row in rows] == there(run)
    assert {(row["state"], row["attempt"]) for row in rows} == {("committed", "1")}
    assert rows[1]["why"] == "best reward: 1.5"


def test_ls_of_nothing(run: Run, capsys: Output) -> None:
    for path in run.checkpoints.iterdir():
        path.rename(run.path / path.name)
    assert called(capsys, "ls", "one") == (0, "one has no checkpoints\n", "")
    assert called(capsys, "verify", "one")[:2] == (0, "one has no committed checkpoints\n")


def test_verify(run: Run, capsys: Output) -> None:
    assert called(capsys, "verify", "one", "10") == (0, "s000010: ok, 2.0 KiB\n", "")
    (run.checkpoint(30) / "model").write_bytes(b"\1" + bytes(2047))
    code, out, _ = called(capsys, "verify", "one")
    assert code == 1
    assert len(out.splitlines()) == 5
    assert f"s000030: damaged: {run.checkpoint(30)}/model: checksum differs from the manifest" in out
    code, _, err = called(capsys, "verify", "one", "11")
    assert code == 5
    assert "one has no checkpoint 11; there are: s000010, s000020, s000030, s000040, s000050" in err


def test_rm(run: Run, capsys: Output) -> None:
    assert called(capsys, "rm", "one", "10", "s000020") == (0, "deleted s000010\ndeleted s000020\n", "")
    assert there(run) == ["s000030", "s000040", "s000050"]
    code, _, err = called(capsys, "rm", "one", "30", "50")
    assert code == 5
    assert "s000050: the run goes on from the newest" in err
    assert there(run) == ["s000030", "s000040", "s000050"], "all or nothing"
    assert called(capsys, "rm", "one", "30", "50", "--force")[0] == 0
    assert there(run) == ["s000040", "starts.jsonl"], "which tells that a person did it"
    assert called(capsys, "rm", "one", "40")[0] == 5


@pytest.mark.usefixtures("active")
def test_rm_of_what_a_run_needs_that_is_not_over(run: Run, capsys: Output) -> None:
    begin(run.checkpoint(60), 1)
    assert called(capsys, "rm", "one", "10")[0] == 0
    for words in (["50", "--force"], [".tmp-s000060.1"]):
        code, _, err = called(capsys, "rm", "one", *words)
        assert code == 5
        assert "and may need" in err
        assert "`hpcrl cancel` it first" in err
    assert there(run) == [".tmp-s000060.1", "s000020", "s000030", "s000040", "s000050"]


def test_export_refuses_before_it_loads_anything(run: Run, capsys: Output) -> None:
    run.export(50).mkdir(parents=True)
    code, _, err = called(capsys, "export", "one")
    assert code == 5
    assert "exists; move it away, or choose another directory with --output" in err
    (run.checkpoint(40) / "model").unlink()
    code, _, err = called(capsys, "export", "one", "40")
    assert code == 6
    assert "expected 2048 bytes, found no file" in err
