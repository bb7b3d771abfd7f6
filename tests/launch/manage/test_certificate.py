"""Certificates of runs: what they have, what they find, and which of two runs' bits differ first."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.data.batch_file import FIRST, read_batch, write_batch
from hpcrl.launch.manage.certificate import _MEMBERS, certificate_of, first_difference, given_differences
from hpcrl.rundir.checksums import note_checksums
from hpcrl.rundir.commit import committed_directory, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.records import with_checksum
from hpcrl.rundir.starts import note
from hpcrl.types import Batch, GroupMeta, SampleMeta
from tests.launch.manage.test_verify import publish
from tests.paths import QUICKSTART

STEPS = 4


def group(name: str, digest: str, seconds: float) -> GroupMeta:
    sample = SampleMeta(0.5, (6,), 3, "stop", {}, 0.5)
    path = f"samples/0/{name}-{seconds}.safetensors"
    return GroupMeta(name, "train", int(seconds), path, [sample], 0, 0, "letters", seconds, digest=digest)


def made(path: Path, seconds: float, digests: dict[int, str] | None = None, *settings: str, last: int = 7) -> Run:
    """Return a finished run of four steps; `digests` of its second groups by step, `last` the state after the last one."""
    run, previous = Run(path), FIRST
    overrides = ["trainer.deterministic=true", f"trainer.run_name={path.name}", *settings]
    write_text(run.config, Config.from_toml([QUICKSTART], overrides).to_toml())
    write_text(run.code / "jobs" / "train.py", "print('hello')\n")
    note_checksums(run, {})
    write_json(run.submission, {"executor": "slurm", "job_id": "7", "overrides": [], "submitted": seconds})
    open_attempt(run, f"{seconds}", ["n1"])
    note(run, {"attempt": 1, "from": None})
    note(run, {"attempt": 1, "kept": ["s000002", "s000004"], "step": STEPS})  # nobody needs its samples any more
    for step in range(1, STEPS + 1):
        names = [f"g{2 * step + at:08d}" for at in (0, 1)]
        own = (digests or {}).get(step, "b")
        groups = [group(names[0], "a", seconds), group(names[1], own, seconds)]
        previous = write_batch(run, Batch(step, groups, 2 * step), previous)
    for step in (2, STEPS):
        facts = {"step": step, "world_size": 2, "torch": "2.13"}
        with committed_directory(run.checkpoint(step), 1, **facts) as directory:
            (directory / "__0_0.distcp").write_bytes(bytes([step, last if step == STEPS else 0]))
            (directory / ".metadata").write_bytes(
                pickle.dumps(Metadata({}, storage_data={}, planner_data={"written by": path.name}))
            )
    publish(run, STEPS)
    report_outcome(run, 1, "done", "", "agent-0")
    return run


def test_runs_that_took_other_times_have_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = made(tmp_path / "p" / "one", 1.0), made(tmp_path / "p" / "other", 2.0, None, "trainer.ckpt_interval=7")
    found = certificate_of(one)
    assert first_difference(found, certificate_of(other)) is None
    assert given_differences(found, certificate_of(other)) == []
    assert (len(found["steps"]), found["ranks"], found["deterministic"]) == (STEPS, 2, True)
    assert main(["certify", "one", "--root", str(tmp_path), "--against", "other"]) == 0
    assert "the same bits: batches of 4 steps, and v000004, s000002, s000004" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("digests", "last", "words"),
    [
        ({3: "c"}, 7, "first difference: step 3: it trains something else"),
        ({3: "c", 4: "c"}, 8, ": g00000007"),
        ({}, 8, "first difference: step 4: checkpoints s000004 differ"),
        ({4: "c"}, 8, "first difference: step 4: it trains something else"),
    ],
)
def test_the_first_difference(
    digests: dict[int, str], last: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "p" / "one", 1.0)
    made(tmp_path / "p" / "other", 2.0, digests, "trainer.seed=3", last=last)
    assert main(["certify", "one", "--root", str(tmp_path), "--against", "other"]) == 1
    told = capsys.readouterr().out
    assert words in told
    assert "given: configuration: trainer.seed: 42 and 3" in told


def test_a_checkpoint_within_a_step_differs_by_that_step() -> None:
    nothing = {"steps": [], "weights": {}, "checkpoints": {}}
    one, other = ({**nothing, "checkpoints": {"s000041u2": digest}} for digest in ("a", "b"))
    found = first_difference(one, other)
    assert found is not None
    assert found[0] == 42


def test_a_certificate_is_checked_and_compared_without_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, root = made(tmp_path / "p" / "one", 1.0), ["--root", str(tmp_path)]
    assert main(["certify", "one", *root, "--check"]) == 5
    assert main(["certify", "one", *root, "-o", str(tmp_path / "kept.json")]) == 0
    assert run.certificate.read_bytes() == (tmp_path / "kept.json").read_bytes()
    assert main(["certify", "one", *root, "--check"]) == 0
    made(tmp_path / "p" / "other", 2.0, {2: "c"})
    assert main(["certify", "other", *root, "--against", str(tmp_path / "kept.json")]) == 1
    assert "first difference: step 2" in capsys.readouterr().out

    file = read_batch(run.batch(STEPS))
    assert file is not None
    run.batch(STEPS).unlink()
    assert main(["certify", "one", *root, "--check"]) == 1
    assert "4 steps were certified, and 3 are there" in capsys.readouterr().out
    assert file.previous is not None
    changed = [group("g00000008", "z", 1.0), file.batch.groups[1]]
    write_batch(run, Batch(STEPS, changed, 2 * STEPS), file.previous)
    assert main(["certify", "one", *root, "--check"]) == 1
    assert "first difference: step 4" in capsys.readouterr().out

    text = run.certificate.read_text().replace('"trainer.seed": 42', '"trainer.seed": 43')
    run.certificate.write_text(text)
    assert main(["certify", "one", *root, "--check"]) == 11
    assert "is no certificate: its checksum differs" in capsys.readouterr().err
    run.batch(2).unlink()
    assert main(["certify", "one", *root]) == 11
    assert "s000002.json is missing" in capsys.readouterr().err


def test_what_is_no_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "p" / "one", 1.0)
    against = ["--against", str(tmp_path / "strange.json")]
    records = [{"run": 1}, {"steps": [[1, 2]]}, {**{name: {} for name in _MEMBERS}, "steps": [["a"]]}]
    for text in ("", "[1]", "{}", "[" * 10_000, *(with_checksum(record)[0] for record in records)):
        (tmp_path / "strange.json").write_text(text)
        assert main(["certify", "one", "--root", str(tmp_path), *against]) == 11, text[:50]
        assert "strange.json is no certificate" in capsys.readouterr().err, text[:50]


def test_a_login_node_certifies_without_torch(tmp_path: Path) -> None:
    made(tmp_path / "p" / "one", 1.0)
    words = ["certify", "one", "--root", str(tmp_path)]
    lines = f"import sys; from hpcrl.cli.main import main; assert main({words}) == 0; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
