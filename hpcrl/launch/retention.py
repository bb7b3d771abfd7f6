"""Deletes what a run that ended need not keep: trainer.keep_when_done at its end, `hpcrl rm --keep` later.

    checkpoints/    but for the last one and those of ckpt_keep_best and ckpt_keep_every; with "export", all whose step is exported
    weights/        engines get them again from the checkpoint; they stay where they are newer than it, or a job has yet to evaluate some
    dataset/        made again from its source

What stays is verified first. Each directory leaves its name before it is deleted, so a kill in between leaves whole ones.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcrl.data.weight_files import check_export
from hpcrl.errors import CommitError, HpcrlError, RunError
from hpcrl.observe.metrics import values_of
from hpcrl.rundir.checkpoints import Retention, line_of, verify_checkpoint
from hpcrl.rundir.commit import (
    COMMIT,
    Fence,
    children,
    committed,
    committed_by,
    discard,
    read_bytes,
    unfenced,
)
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run, position_of, step_of, version_of
from hpcrl.rundir.ledger import read_attempts, read_outcome, require_newest
from hpcrl.rundir.other_roots import own_homes
from hpcrl.rundir.starts import given_up_by, note, read_starts
from hpcrl.upload.send import unsent

if TYPE_CHECKING:
    from hpcrl.config.sections.upload import UploadConfig

Kept = Literal["last", "export"]
_PATH = re.compile(r'"(/[^"\n]*)"')


def end_of_run(run: Run, keep: Kept, retention: Retention, upload: UploadConfig, attempt: int) -> None:
    """Delete what trainer.keep_when_done does not keep of a run that is done; a failure is printed, and changes nothing about the run."""
    try:
        for path in shrink(run, keep, retention, upload, partial(require_newest, run, attempt)):
            print(f"trainer.keep_when_done: deleted {path.relative_to(run.path)}", flush=True)
    except (HpcrlError, OSError) as error:
        print(f"trainer.keep_when_done: {error}; `hpcrl rm {run.name} --keep` deletes the rest", flush=True)


def shrink(run: Run, keep: Kept, retention: Retention, upload: UploadConfig, fence: Fence = unfenced) -> Iterator[Path]:
    """Delete what a run that is over need not keep, and yield what is deleted.

    Checkpoints stay that uploads or other runs still need.

    Args:
        retention: whose best checkpoint stays, and those of its interval.
        upload: trainer.upload.

    Raises:
        RunError: it was interrupted inside a step, or nothing but its weights has what it trained.
        CommitError: what would stay is not whole, or a newer attempt has begun.
        DataError: as `line_of`.
    """
    line, newest = line_of(run), max(committed(run.weights, version_of), default=0)
    exports = _exports(run, line)
    scores = values_of(run, retention.metric) if retention.metric else {}
    evaluated = begun_evaluations(run)
    chosen = {*line[-1:], *retention.chosen(line, scores, evaluated)}
    needed = {*unsent(run, upload), *(path for _, path in uses_of(run))}
    stay = {path for path in chosen if keep == "last" or step_of(path) not in exports}
    stay |= {path for path in line if path in needed}
    last = _verified(run, line, exports, newest, stay, chosen - stay)
    kept = [path.name for path in line if path in stay]
    note(run, {"attempt": len(read_attempts(run)), "kept": kept, "step": step_of(last) or 0})
    for trash in [*run.checkpoints.glob(".trash-*"), *run.path.glob(".trash-*")]:  # of a call that was killed
        shutil.rmtree(trash, ignore_errors=True)
    named = [run.checkpoints / name for name in children(run.checkpoints)]
    # what is in quarantine waits for a person
    old = [path for path in named if path.is_dir() and path not in stay and not path.name.startswith(".quarantined-")]
    unneeded = not evaluated and _has_weights(newest, last, exports)
    folders = [run.weights, run.datasets] if unneeded else [run.datasets]
    for path in [*sorted(old), *filter(Path.is_dir, folders)]:
        discard(path, fence)
        yield path


def _exports(run: Run, line: list[Path]) -> dict[int, Path]:
    """Return the exports by step, without those of a training that a later attempt gave up."""
    lines, exports = read_starts(run), dict[int, Path]()
    for step in committed(run.exports, step_of):
        export, checkpoint = run.export(step), run.checkpoint(step)
        by = committed_by(export)
        if by == 0:  # `hpcrl checkpoint export`, of the checkpoint that was there
            own = checkpoint not in line or _marked(export) >= _marked(checkpoint)
        else:
            own = by is not None and given_up_by(lines, export, by) is None
        if own:
            exports[step] = export
    return exports


def _marked(path: Path) -> float:
    return (path / COMMIT).stat().st_mtime


def _verified(
    run: Run,
    line: list[Path],
    exports: Mapping[int, Path],
    newest: int,
    stay: Collection[Path],
    replaced: Collection[Path],
) -> Path:
    """Return the newest checkpoint or export that stays, after comparing the checksums of its files, and of all exports that replace checkpoints.

    Args:
        newest: step of the newest weights.
        replaced: the checkpoints that an export of their step replaces.
    """
    if not line and max(exports, default=-1) < newest:
        raise RunError(f"{run.name} has neither a checkpoint nor an export of step {newest}; nothing was deleted")
    if line and step_of(line[-1]) is None:
        step, _ = position_of(line[-1]) or (0, 0)
        raise RunError(
            f"{run.name} was interrupted inside step {step + 1}, and continues only with what is there; nothing was deleted"
        )
    if not line:
        last = exports[max(exports)]
    elif line[-1] in stay:
        last = line[-1]
    else:
        last = exports[step_of(line[-1]) or 0]
    try:
        for path in sorted({last, *(exports[step_of(path) or 0] for path in replaced)}):
            (verify_checkpoint if path in line else check_export)(path)
    except CommitError as error:
        raise CommitError(f"{error}; nothing was deleted") from error
    return last


def _has_weights(newest: int, last: Path, exports: Mapping[int, Path]) -> bool:
    """Return whether `last` or a whole export has the newest weights, of step `newest`: the run may have failed steps after its last checkpoint."""
    if newest <= (step_of(last) or 0):
        return True
    with suppress(CommitError):
        if newest in exports:
            check_export(exports[newest])
            return True
    return False


def uses_of(run: Run) -> list[tuple[Run, Path]]:
    """Return paths of a run that configurations of other runs below its root name and may still read.

    A run that is done or cancelled reads nothing more, and one that has a checkpoint of its own no other one.
    """
    own = (run.path, *own_homes(run))
    homes = {*map(str, own), *map(os.path.realpath, own)}
    names = {os.path.basename(home) for home in homes}
    uses = list[tuple[Run, Path]]()
    for other in map(Run, sorted(path.parent for path in run.root.absolute().glob("*/*/config.toml"))):
        try:
            named = _PATH.findall((read_bytes(other.config) or b"").decode())
            # links are followed of those alone that may lead here: each part of a path is a question to the filesystem
            likely = [path for path in named if any(name in path for name in names)]
            paths = {
                run.path / os.path.relpath(path, home)
                for path in {*likely, *map(os.path.realpath, likely)}
                for home in homes
                if path == home or path.startswith(f"{home}/")
            }
            outcome = read_outcome(other) if paths and other != run else None
        except (OSError, ValueError, RunError):  # another user's, or damaged
            continue
        if other == run or not paths or (outcome is not None and outcome.final):
            continue
        begun = bool(committed(other.checkpoints, position_of))
        uses += [(other, path) for path in sorted(paths) if not (begun and run.checkpoints in path.parents)]
    return uses
