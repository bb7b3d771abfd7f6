"""`hpcrl checkpoint …`: list, verify, export and delete what a run has saved."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import Subcommands, add_run, named_run
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run

_ASIDE = {".tmp-": "half-written", ".trash-": "deleted", ".given-up-": "given up", ".quarantined-": "quarantined"}
_STEP_HELP = "step, or name that ls shows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = Subcommands(parser)

    def command(name: str, text: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add(name, text, action)
        add_run(command)
        return command

    ls = command("ls", "show each checkpoint, its state and why it is kept", _ls)
    ls.add_argument("--json", action="store_true", help="a JSON list, one object per checkpoint")
    verify = command("verify", "compare files with sizes and checksums; exit code 1 if one is damaged", _verify)
    verify.add_argument("step", metavar="STEP", nargs="?", help=f"{_STEP_HELP} (default: all that are committed)")
    export = command("export", "write the policy of a checkpoint in Hugging Face format; needs torch", _export)
    export.add_argument("step", metavar="STEP", nargs="?", help=f"{_STEP_HELP} (default: the newest)")
    export.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: RUN/exports/sNNNNNN")
    rm = command("rm", "delete checkpoints", _rm)
    rm.add_argument("steps", metavar="STEP", nargs="+", help=_STEP_HELP)
    rm.add_argument(
        "--force", action="store_true", help="delete the newest ones too, from which `hpcrl resume` would continue"
    )


@dataclass(frozen=True)
class _Listed:
    path: Path
    state: str
    size: int
    age: float
    attempt: str
    why: str


def _rows(run: Run) -> list[_Listed]:
    from hpcrl.config import Config
    from hpcrl.observe.metrics import values_of
    from hpcrl.rundir.checkpoints import Retention, line_of
    from hpcrl.rundir.evaluations import begun_evaluations

    retention = Retention.of(Config.from_toml([run.config]).trainer)
    line, evaluated = line_of(run), begun_evaluations(run)
    reasons = retention.reasons(line, values_of(run, retention.metric) if retention.metric else {}, evaluated)
    rows = []
    for path in sorted(run.checkpoints.iterdir()) if run.checkpoints.is_dir() else []:
        if not path.is_dir():
            continue
        with suppress(FileNotFoundError):  # the run deletes one meanwhile
            age = time.time() - path.stat().st_mtime
            state, why = _state(path, line)
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            why = why or reasons.get(path, "" if path not in line else "goes with the next one")
            rows.append(_Listed(path, state, size, age, _attempt(path), why))
    return rows


def _state(path: Path, line: Sequence[Path]) -> tuple[str, str]:
    from hpcrl.errors import CommitError
    from hpcrl.rundir.commit import is_committed, verify
    from hpcrl.rundir.layout import position_of

    for prefix, state in _ASIDE.items():
        if path.name.startswith(prefix):
            return state, ""
    position = position_of(path)
    if position is None:
        return "unknown", "no checkpoint has such a name"
    if not is_committed(path):
        return "half-written", ""
    try:
        verify(path, checksums=False)
    except CommitError as error:
        return "damaged", str(error)
    if path not in line:
        return "given up", ""
    return ("partial" if position[1] else "committed"), ""


def _attempt(path: Path) -> str:
    from hpcrl.rundir.commit import committed_by

    by = committed_by(path)
    if by is None and path.name.startswith(".tmp-"):
        return path.name.rpartition(".")[2]
    return "-" if by is None else str(by)


def _ls(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.units import readable_size, rough_duration

    run = named_run(arguments)
    rows = _rows(run)
    if arguments.json:
        print(dumps([{**vars(row), "path": str(row.path)} for row in rows], indent=2))
        return 0
    if not rows:
        print(f"{run.name} has no checkpoints")
        return 0
    width = max(len(row.path.name) for row in rows)
    print(f"{'checkpoint':{width}}  {'state':12}  {'size':>10}  {'age':>7}  {'attempt':>7}  kept because")
    for row in rows:
        size, age = readable_size(row.size), rough_duration(row.age)
        line = f"{row.path.name:{width}}  {row.state:12}  {size:>10}  {age:>7}  {row.attempt:>7}  {row.why}"
        print(one_line(line.rstrip()))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import CommitError
    from hpcrl.rundir.checkpoints import find_checkpoint, size_of, verify_checkpoint
    from hpcrl.rundir.commit import is_committed
    from hpcrl.rundir.layout import position_of
    from hpcrl.rundir.other_roots import require_folders
    from hpcrl.units import readable_size

    run = named_run(arguments)
    require_folders(run, run.checkpoints)
    if arguments.step:
        paths = [find_checkpoint(run, arguments.step)]
    else:
        there = sorted(run.checkpoints.iterdir()) if run.checkpoints.is_dir() else []
        paths = [path for path in there if position_of(path) and is_committed(path)]
    damaged = False
    for path in paths:
        try:
            print(f"{path.name}: ok, {readable_size(size_of(verify_checkpoint(path)))}")
        except CommitError as error:
            damaged = True
            print(one_line(f"{path.name}: damaged: {error}"))
    if not paths:
        print(f"{run.name} has no committed checkpoints")
    return int(damaged)


def _export(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import RunError
    from hpcrl.rundir.checkpoints import find_checkpoint, line_of, verify_checkpoint

    run = named_run(arguments)
    line = line_of(run)
    if not arguments.step and not line:
        raise RunError(f"{run.name} has no committed checkpoint")
    checkpoint = find_checkpoint(run, arguments.step) if arguments.step else line[-1]
    target = (arguments.output or run.exports / checkpoint.name).absolute()
    if target.exists():
        raise RunError(f"{target} exists; move it away, or choose another directory with --output")
    verify_checkpoint(checkpoint)
    try:
        from hpcrl.trainer.saving.export import export_checkpoint
    except ImportError as error:
        raise RunError(f"export needs {error.name}: run it where the jobs run") from error
    export_checkpoint(run, checkpoint, target)
    print(target)
    return 0


def _rm(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import RunError
    from hpcrl.launch.manage.registry import states_of
    from hpcrl.rundir.checkpoints import find_checkpoint, line_of, needed
    from hpcrl.rundir.commit import discard
    from hpcrl.rundir.ledger import read_attempts
    from hpcrl.rundir.other_roots import require_own
    from hpcrl.rundir.starts import note

    run = named_run(arguments)
    require_own(run, run.checkpoints)
    newest = needed(line_of(run))
    paths = list(dict.fromkeys(find_checkpoint(run, step) for step in arguments.steps))
    wanted = [path for path in paths if path in newest]
    if wanted and not arguments.force:
        raise RunError(
            f"{_names(wanted)}: the run goes on from the newest, and from the one before if that is damaged; --force deletes them all "
            "the same"
        )
    if wanted or any(path.name.startswith(".tmp-") for path in paths):
        state = states_of([run])[0]
        if not state.over:
            raise RunError(
                f"{run.name} is {state.kind} and may need {_names(wanted or paths)}; `hpcrl cancel` it first"
            )
    if wanted:
        note(run, {"attempt": len(read_attempts(run)), "removed": [path.name for path in wanted]})
    for path in paths:
        discard(path)
        print(f"deleted {path.name}")
    return 0


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)
