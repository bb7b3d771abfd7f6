"""Damage to each kind of file of a run that ended: `hpcrl verify` names it, and the next attempt refuses it, repairs it, or does without it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.controller.recovery import read_history
from hpcrl.data.cache_files import turn_file
from hpcrl.data.group_file import read_group
from hpcrl.data.weight_files import WeightFile, check_export, check_weights, weight_facts
from hpcrl.errors import CommitError, DataError, HpcrlError
from hpcrl.launch.manage.verify import PARTS
from hpcrl.rundir.checked_lines import append_lines
from hpcrl.rundir.checkpoints import newest_usable
from hpcrl.rundir.checksums import note_checksums, require_unchanged
from hpcrl.rundir.commit import begin, committed_directory, finish, listing, write_json, write_text
from hpcrl.rundir.layout import Run, position_of
from hpcrl.rundir.ledger import Attempt, Outcome, open_attempt, read_outcomes, report_outcome, require_attempts
from hpcrl.rundir.starts import note, read_starts, require_starts
from hpcrl.types import GroupMeta
from tests.controller.test_api import finish as finish_group
from tests.controller.test_api import write_together
from tests.controller.test_service import SCHEDULE, train_to
from tests.controller.test_service import service as controller_of
from tests.paths import QUICKSTART

CHECKPOINT = 3


def publish(run: Run, version: int) -> None:
    write_weights(run.weights_of(version), version, version=version)


def export(run: Run, step: int) -> Path:
    """Commit an export, as the trainer does, and return it."""
    write_weights(run.export(step), step, {"config.json": "{}"}, step=step)
    return run.export(step)


def write_weights(target: Path, seed: int, others: Mapping[str, str] = MappingProxyType({}), **facts: int) -> None:
    tensors = {f"layer.{number}": torch.full((64, 8), float(seed + number)) for number in range(3)}
    directory = begin(target, 1)
    file = WeightFile(directory / "model.safetensors", {name: value.to("meta") for name, value in tensors.items()})
    digests = {name: file.write(name, tensor) for name, tensor in tensors.items()}
    file.close()
    files = {"model.safetensors": {"size": (directory / "model.safetensors").stat().st_size}}
    for name, text in others.items():
        write_text(directory / name, text)
    files |= listing(directory, lambda path: path.name in others)
    finish(target, 1, files=files, **facts, **weight_facts(digests, None))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was interrupted in step 5: checkpoints of steps 1 and 3, two batches after them, and a group that no batch has."""
    run = Run(tmp_path_factory.mktemp("root") / "project" / "mine")
    write_text(run.config, Config.from_toml([QUICKSTART]).to_toml())
    write_text(run.token, "secret\n", mode=0o600)
    write_text(run.code / "jobs" / "train.py", "print('hello')\n")
    write_text(run.code / "hpcrl" / "__init__.py", "")
    note_checksums(run, {})
    open_attempt(run, "7.0", ["n1"])
    write_json(run.submission, {"executor": "slurm", "job_id": "7", "overrides": [], "submitted": 1.0})
    controller = controller_of(run, eval_interval=0, total_steps=9, staleness=1)
    controller.start(0)
    train_to(run, controller, 1, 4)
    for step in (1, CHECKPOINT):
        with committed_directory(run.checkpoint(step), 1, step=step) as directory:
            (directory / "weights.distcp").write_bytes(bytes([step, *range(200)]) * 8)
    for version in (3, 4):
        publish(run, version)
    first, second, third = [finish_group(run, item, 4) for item in controller.claim("rollout-0", 4, 3)]
    assert controller.complete([*write_together(run, [first, second]), third]) == {}
    note(run, {"attempt": 1, "from": None})
    write_text(run.metrics_of("trainer"), '{"step": 1}\n{"step": 2}\n')
    report_outcome(run, 1, "interrupted", "asked to stop", "agent-0")
    assert [run.batch(step).exists() for step in range(1, 7)] == [True] * 5 + [False]
    return run


@dataclass
class Start:
    """What an attempt would begin with: all that training reads from the run directory.

    Attributes:
        settings, code: the texts.
        attempts, outcomes, starts: what the ones before it have left.
        checkpoint: position and content.
        composed: batches after it; groups by id, with all their tensors.
        finished: groups that no batch has.
    """

    settings: str
    code: dict[str, str]
    attempts: list[Attempt]
    outcomes: list[Outcome]
    starts: list[dict[str, Any]]
    checkpoint: tuple[str, dict[str, bytes]]
    used: set[int]
    composed: dict[int, dict[str, list[Any]]]
    finished: dict[int, list[Any]]


def start(run: Run) -> Start:
    """Do what an attempt does before it trains.

    Raises:
        HpcrlError: it refuses to.
    """
    attempts, outcomes = require_attempts(run), read_outcomes(run)
    require_unchanged(run)
    require_starts(run)
    Config.from_toml([run.config])
    checkpoint = newest_usable(run, 2, lambda _: None)
    assert checkpoint
    step, _ = position_of(checkpoint) or (0, 0)
    history = read_history(run, step, SCHEDULE.batch_size, lambda _: True, lambda *_: True)

    def content(group: GroupMeta) -> list[Any]:
        rows = read_group(run.inside(group.path), None, group)
        return [{name: str(value) for name, value in vars(row).items()} for row in rows]

    return Start(
        run.config.read_text(),
        {str(path): path.read_text() for path in sorted(run.code.rglob("*.py"))},
        attempts,
        outcomes,
        read_starts(run),
        (checkpoint.name, {path.name: path.read_bytes() for path in checkpoint.iterdir()}),
        {*range(history.below), *history.used},
        {n: {group.group_id: content(group) for group in batch.groups} for n, batch in history.batches.items()},
        {index: content(meta) for index, meta in history.finished.items()},
    )


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(part: float) -> Callable[[Path], None]:
    """Flip the lowest bit of the byte that lies at this part of the file."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(part * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return change


def garble(path: Path) -> None:
    path.write_bytes(b"\xff\x00{" * 30)


def exchange(path: Path) -> None:
    """Put in its place another file of the same kind, which is whole."""
    others = {
        "config.toml": lambda: path.read_text().replace("lr = ", "lr = 1"),
        "s000001.json": lambda: path.with_name("s000002.json").read_text(),
    }
    if path.name in others:
        path.write_text(others[path.name]())
        return
    same_kind = (each for each in sorted(path.parent.parent.rglob(f"*{path.suffix}")) if each.is_file())
    shutil.copy(next(each for each in same_kind if each.read_bytes() != path.read_bytes()), path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": delete,
    "empty": empty,
    "cut": halve,
    "first bit": flip(0),
    "early bit": flip(0.2),
    "middle bit": flip(0.5),
    "late bit": flip(0.93),
    "last bit": flip(1),
    "garbage": garble,
    "exchanged": exchange,
}
REFUSED, REPAIRED, SAME = "refused", "repaired", "same"
KINDS: dict[str, tuple[Callable[[Run], Path], str]] = {
    "configuration": (lambda run: run.config, REFUSED),
    "code": (lambda run: run.code / "jobs" / "train.py", REFUSED),
    "attempts": (lambda run: run.attempts, REFUSED),
    "starts": (lambda run: run.starts, REFUSED),
    "outcome": (lambda run: run.outcome(1), REFUSED),
    "first batch": (lambda run: run.batch(1), REFUSED),
    "batch before the checkpoint": (lambda run: run.batch(2), REFUSED),
    "batch of the checkpoint": (lambda run: run.batch(CHECKPOINT), REFUSED),
    "next batch": (lambda run: run.batch(CHECKPOINT + 1), REPAIRED),
    "last batch": (lambda run: run.batch(CHECKPOINT + 2), REPAIRED),
    "samples of the next batch": (lambda run: run.samples / "0" / "g00000006.safetensors", REPAIRED),
    "samples of the last batch": (lambda run: run.samples / "0" / "g00000008.safetensors", REPAIRED),
    "samples without a batch": (lambda run: run.samples / "0" / "g00000010.safetensors", REPAIRED),
    "checkpoint": (lambda run: run.checkpoint(CHECKPOINT) / "weights.distcp", REPAIRED),
    "manifest of a checkpoint": (lambda run: run.checkpoint(CHECKPOINT) / "manifest.json", REPAIRED),
    "mark of a checkpoint": (lambda run: run.checkpoint(CHECKPOINT) / "COMMIT", REPAIRED),
    "weights": (lambda run: run.weights_of(3) / "model.safetensors", SAME),
    "manifest of weights": (lambda run: run.weights_of(3) / "manifest.json", SAME),
    "mark of weights": (lambda run: run.weights_of(3) / "COMMIT", SAME),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_changes_training_without_a_word(
    whole: Run, tmp_path: Path, kind: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    find, expected = KINDS[kind]
    run = Run(tmp_path / "project" / "mine")
    shutil.copytree(whole.path, run.path, symlinks=True)
    before = start(run)
    assert not [sentence for part in PARTS for sentence in part.damaged(run)]
    path = find(run)
    DAMAGES[damage](path)

    found = [sentence for part in PARTS for sentence in part.damaged(run)]
    # as if the last thing before the end had not been written
    last = kind in ("last batch", "samples without a batch", "outcome")
    never_there = damage == "deleted" and (path.name == "COMMIT" or last)
    assert bool(found) != never_there, found
    capsys.readouterr()
    if expected == REFUSED and not never_there:
        with pytest.raises(HpcrlError, match=re.escape(path.stem if kind == "code" else path.name)):
            start(run)
        return
    if kind == "outcome":
        assert start(run) == replace(before, outcomes=[])
        open_attempt(run, "7.1", ["n1"])
        assert [(outcome.attempt, outcome.kind) for outcome in read_outcomes(run)] == [(1, "lost")]
        return
    after, said = start(run), capsys.readouterr().out
    if expected == SAME:
        assert after == before
        with pytest.raises(CommitError):
            check_weights(run.weights_of(3))
        return
    assert after != before, "it does without the file"
    if kind.startswith(("next", "last", "samples")) and not never_there:
        assert path.name in said, "the controller's log tells why"
    # what is still used is what it was
    assert after.settings == before.settings
    assert after.code.keys() == before.code.keys()
    if after.checkpoint[0] == before.checkpoint[0]:
        assert after.checkpoint == before.checkpoint
        assert after.composed.items() <= before.composed.items()
        groups = {name: rows for batch in before.composed.values() for name, rows in batch.items()}
        groups |= {f"g{index:08d}": rows for index, rows in before.finished.items()}
        assert all(groups[f"g{index:08d}"] == rows for index, rows in after.finished.items())
    else:
        assert after.checkpoint[0] == "s000001"
        assert after.used == set(range(10))
        assert len(after.composed) == 4


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_of_an_export_is_found(tmp_path: Path, name: str) -> None:
    path = export(Run(tmp_path / "project" / "mine"), 4)
    check_export(path)
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(CommitError, match=r"config.json: checksum differs|other tensors than were exported: layer.2"):
        check_export(path)
    (part,) = (part for part in PARTS if part.what == "exports")
    assert len([*part.damaged(Run(tmp_path / "project" / "mine"))]) == 1


def test_the_command_names_what_is_damaged(whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "project" / "mine")
    shutil.copytree(whole.path, run.path, symlinks=True)
    assert main(["verify", str(run.path)]) == 0
    assert "damaged" not in capsys.readouterr().out
    flip(0.5)(run.batch(4))
    turns = turn_file(run, "rollout-0", "g00000011", 4)
    append_lines(turns, [{"versions": [version]} for version in (4, 3, 5)])
    rows = run.eval_rows(4, 0)
    append_lines(rows, ["no row", ["asked", "weights", {}], "cut off"])
    run.batch(1).unlink()
    run.outcome(1).write_text("[]")
    with run.attempts.open("a") as file:
        file.write('{"number": 2, "jo\n[1]\n{"number": 3, "jo')
    run.checksums.write_text("[")
    assert main(["verify", str(run.path)]) == DataError.exit_code
    said, wrong = capsys.readouterr()
    assert f"{run.batch(1)} is missing" in said
    assert f"{run.batch(4)} is damaged: its checksum differs" in said
    assert f"{run.outcome(1)} is damaged: expected an object" in said
    assert f"{run.attempts}, line 3, is damaged: expected an object" in said
    assert "line 2" not in said, "what was cut off by a kill is no damage"
    assert "line 4" not in said
    assert "checksums.json is damaged" in said
    assert "batches: 2 damaged: those after the newest checkpoint are composed again" in said
    assert f"{turns}: 1 of its lines" in said
    assert f"{rows}: 2 of its lines" in said
    assert "checkpoints: ok" in said
    assert "mine: 7 files are not as they were written" in wrong


def test_what_a_damaged_file_says_does_not_steer_the_terminal(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "project" / "mine")
    shutil.copytree(whole.path, run.path, symlinks=True)
    write_text(run.code / "jobs" / "\x1b[2J.py", "")
    assert main(["verify", str(run.path)]) == DataError.exit_code
    said = capsys.readouterr().out
    assert "code/jobs/\\u001b[2J.py is new" in said
    assert "\x1b" not in said


def test_the_command_names_what_is_missing_between_others(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "project" / "mine")
    shutil.copytree(whole.path, run.path, symlinks=True)
    for number in (2, 3, 4):
        open_attempt(run, f"7.{number}", ["n1"])
    assert main(["verify", str(run.path)]) == 0
    first, _, *others = run.attempts.read_text().splitlines()
    run.attempts.write_text("\n".join([first, *others]))
    run.outcome(3).unlink()
    run.starts.unlink()
    capsys.readouterr()
    assert main(["verify", str(run.path)]) == DataError.exit_code
    said = capsys.readouterr().out
    assert "record of the run: 3 damaged" in said
    assert f"{run.attempts} does not know attempt 2" in said
    assert f"{run.outcome(3)} is missing" in said
    assert f"{run.starts} does not know where attempt 1 started" in said
