"""Finds the checkpoints of a run, the one that an attempt starts from, and those that stay.

Beside the committed ones, checkpoints/ may hold directories that no attempt starts from:

    .tmp-s000040.3           attempt 3 is writing it, or did not finish
    .trash-s000030.4711      it is being deleted
    .given-up-s000040.3      attempt 3 started before it; it goes when two newer checkpoints are there
    .quarantined-s000040.3   two attempts failed while they loaded it, and another one could be loaded; a person looks at it, and
                             deletes it or gives it its name back
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcrl.errors import CommitError, DataError, RunError
from hpcrl.faults import fault
from hpcrl.rundir.checkpoint_index import check_indexes
from hpcrl.rundir.commit import (
    Fence,
    children,
    committed,
    committed_by,
    discard,
    is_committed,
    unfenced,
    verify,
    write_text,
)
from hpcrl.rundir.layout import Run, position_of, step_of
from hpcrl.rundir.ledger import read_outcomes
from hpcrl.rundir.other_roots import lost_folders, require_folders
from hpcrl.rundir.records import as_record, damaged, read_object, with_checksum
from hpcrl.rundir.starts import Line, failed_loads, given_up_by, last_started, read_starts

if TYPE_CHECKING:
    from hpcrl.config.sections.trainer import TrainerConfig

NEVER_DELETED = 2  # the newest may turn out to be damaged when it is needed
_MOST_FAILED_LOADS = 2
_ASIDE = re.compile(r"\.(given-up|quarantined)-(.+)\.(\d+)")
_STAGED = re.compile(r"\.tmp-.+\.(\d+)")

Report = Callable[[str], None]

Verify = Callable[[Path], object]
"""Raises CommitError where a checkpoint is not whole."""


@dataclass(frozen=True)
class NotedCommit:
    """The newest checkpoint of a run, as the run directory notes it.

    Attributes:
        attempt: that committed it.
    """

    attempt: int
    step: int


@dataclass(frozen=True)
class Retention:
    """Rule by which checkpoints stay; the newest two after a step always do. Those inside a step, of which the newest two stay, go with the next
    one after a step.

    Attributes:
        newest: how many of the newest; negative: all.
        every: those whose step is a multiple of it; 0: none.
        metric: the one whose step has the best value of it, and those whose evaluation has yet to tell theirs; None: none.
        mode: whether the highest or the lowest value is the best.
    """

    newest: int = -1
    every: int = 0
    metric: str | None = None
    mode: Literal["max", "min"] = "max"

    @classmethod
    def of(cls, trainer: TrainerConfig) -> Retention:
        mode = trainer.best_mode or "max"
        return cls(trainer.max_ckpts_to_keep, trainer.ckpt_keep_every, trainer.ckpt_keep_best, mode)

    def reasons(
        self, line: Sequence[Path], scores: Mapping[int, float], evaluated: Collection[int] = ()
    ) -> dict[Path, str]:
        """Return why each of the checkpoints that stay does.

        Args:
            line: all committed ones, oldest first.
            scores: the metric by step.
            evaluated: steps whose evaluation is not over.
        """
        if self.newest < 0:
            return dict.fromkeys(needed(line, len(line)), "all are kept")
        newest = max(self.newest, NEVER_DELETED)
        return dict.fromkeys(needed(line, newest), f"newest {newest}") | self.chosen(line, scores, evaluated)

    def chosen(
        self, line: Sequence[Path], scores: Mapping[int, float], evaluated: Collection[int] = ()
    ) -> dict[Path, str]:
        """Return those of the checkpoints that stay however old they are. Args as of `reasons`."""
        reasons = dict[Path, str]()
        steps = {position[0]: path for path in line if (position := position_of(path)) and not position[1]}
        if self.every:
            reasons = {path: f"every {self.every}" for step, path in steps.items() if step % self.every == 0}
        if (self.metric or "").startswith("eval/"):
            reasons |= {path: "it is being evaluated" for step, path in steps.items() if step in evaluated}
        scored = {step: scores[step] for step in steps if math.isfinite(scores.get(step, math.nan))}
        if self.metric and scored:
            sign = 1 if self.mode == "max" else -1
            best = max(scored, key=lambda step: (sign * scored[step], step))
            reasons[steps[best]] = f"best {self.metric}: {scored[best]:.4g}"
        return reasons


def needed(line: Sequence[Path], newest: int = NEVER_DELETED) -> list[Path]:
    """Return the newest of the checkpoints after a whole step, and the newest two inside steps after them."""
    whole = [path for path in line if (position_of(path) or (0, 0))[1] == 0]
    after = line[line.index(whole[-1]) + 1 :] if whole else line
    stay = {*whole[-newest:], *after[-NEVER_DELETED:]}
    return [path for path in line if path in stay]


def verify_checkpoint(path: Path, checksums: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint, as `verify` does, after reading its indexes too: whether they can be loaded without running code."""
    manifest = verify(path, checksums)
    check_indexes(path)
    return manifest


def line_of(run: Run) -> list[Path]:
    """Return the committed checkpoints, oldest first, without those that a later attempt gave up.

    Raises:
        DataError: they lie below another root and are not there.
    """
    require_folders(run, run.checkpoints)
    lines = read_starts(run)
    return [path for path in _named(run) if _in_line(lines, path)]


def newest_of_line(run: Run) -> Path | None:
    """Return the last one of `line_of`, without a look at those before it."""
    lines = read_starts(run)
    return next((path for path in reversed(_named(run)) if _in_line(lines, path)), None)


def _in_line(lines: Sequence[Line], path: Path) -> bool:
    by = committed_by(path)
    return by is not None and not given_up_by(lines, path, by)


def find_checkpoint(run: Run, name: str) -> Path:
    """Return the directory that a step or a name of a person means.

    Raises:
        RunError: there is none.
        DataError: as `line_of`.
    """
    require_folders(run, run.checkpoints)
    names = [name, f"s{int(name):06d}"] if name.isdecimal() else [name]
    there = [run.checkpoints / name for name in children(run.checkpoints) if (run.checkpoints / name).is_dir()]
    for path in there:
        if path.name in names:
            return path
    listed = ", ".join(sorted(path.name for path in there)) or "none"
    raise RunError(f"{run.name} has no checkpoint {name}; there are: {listed}")


def steps_left(run: Run) -> list[int]:
    """Return the steps of the checkpoints that were committed and that no later attempt gave up, whether they are whole or not."""
    lines, left = read_starts(run), []
    for step in committed(run.checkpoints, step_of):
        by = committed_by(run.checkpoint(step))  # None: the mark is damaged
        if by is None or not given_up_by(lines, run.checkpoint(step), by):
            left.append(step)
    return left


def samples_removed(run: Run) -> int:
    """Return the step up to which the samples of batches are not needed, else 0.

    It is that of the older one of the two newest checkpoints, or of the last one of a run that kept no second one after its end.
    """
    kept = committed(run.checkpoints, step_of)[-2:]
    ended = max((line.get("step", 0) for line in read_starts(run) if "kept" in line), default=0)
    return max(ended, kept[0] if len(kept) == 2 else 0)


def note_committed(run: Run, attempt: int, step: int) -> None:
    """Write into the run directory that attempt `attempt` has committed `step`: checkpoints/ may lie on a filesystem that is lost later."""
    write_text(run.committed, with_checksum({"attempt": attempt, "step": step})[0])


def noted_commit(run: Run) -> NotedCommit | None:
    """Return what `note_committed` has written, or None. Raises RunError where the file is damaged."""
    remedy = "remove it"
    record = read_object(run.committed, remedy)
    return None if record is None else as_record(NotedCommit, record, run.committed, remedy)


def require_checkpoints(run: Run) -> None:
    """Look whether a run that had a checkpoint has one now: training does not restart from step 0 by itself.

    What `hpcrl checkpoint rm` deleted may be gone.

    Raises:
        DataError: it has none.
        RunError: it has none because all were deleted after its end.
    """
    lines = read_starts(run)
    removed = max((line["attempt"] for line in lines if "removed" in line), default=0)
    commits = [(outcome.attempt, outcome.step) for outcome in read_outcomes(run)]
    if (noted := noted_commit(run)) is not None:
        commits.append((noted.attempt, noted.step))
    had = max((step for attempt, step in commits if attempt > removed), default=0)
    had_one = f"{run.name} had a checkpoint of step {had}, and " if had else ""
    if lost := lost_folders(run).get(run.checkpoints):
        raise DataError(had_one + lost)
    if had and not committed(run.checkpoints, position_of):
        if lines and lines[-1].get("kept") == []:
            exports = ", ".join(str(run.export(step)) for step in committed(run.exports, step_of)[-1:]) or "an export"
            raise RunError(
                f"{run.name} keeps no checkpoint since its end (trainer.keep_when_done, `hpcrl rm --keep`); submit a new run that "
                f"begins with what it trained: trainer.policy.model.path={exports}"
            )
        place = run.elsewhere.get(run.checkpoints, run.checkpoints)
        raise DataError(
            f"{had_one}{place} holds none any more, so training would restart from step 0. Put it back from a backup, or submit a new run"
        )


def _named(run: Run) -> list[Path]:
    paths = [run.checkpoints / name for name in children(run.checkpoints)]
    return sorted((path for path in paths if position_of(path)), key=lambda path: position_of(path) or (0, 0))


def newest_usable(
    run: Run,
    attempt: int,
    report: Report,
    unusable: Callable[[Path], str | None] = lambda _: None,
    fence: Fence = unfenced,
    verify: Verify = verify_checkpoint,
) -> Path | None:
    """Return the newest checkpoint that is committed and whole, or None.

    One that two attempts failed to load is put into quarantine if another can take its place. Where two attempts fail to load that one
    too, the checkpoints are hardly what is wrong: the quarantine ends, and none begins before training has started again.

    Args:
        report: is called for each one that is passed over, with the reason.
        unusable: returns why training cannot go on from one, though it is whole; None: it can.

    Raises:
        DataError: as `line_of`.
    """
    require_folders(run, run.checkpoints)
    lines = read_starts(run)
    failed = {key: those for key, those in failed_loads(run, lines).items() if len(those) >= _MOST_FAILED_LOADS}
    if len(failed) > 1:
        _end_quarantine(run, last_started(lines), fence, report)
    found = _newest_whole(run, lines, None, report, unusable, verify)
    if found is None or len(failed) != 1 or (found.name, committed_by(found)) not in failed:
        return found
    instead = _newest_whole(run, lines, found, report, unusable, verify)
    if instead is None:
        return found
    aside = found.with_name(f".quarantined-{found.name}.{attempt}")
    fence()
    os.rename(found, aside)
    (attempts,) = failed.values()
    listed = " and ".join(map(str, attempts[-_MOST_FAILED_LOADS:]))
    report(
        f"attempts {listed} failed while they loaded {found}: it is {aside.name} now, and training goes on from {instead.name}. To use "
        "it again, give it its name back"
    )
    return instead


def _newest_whole(
    run: Run,
    lines: Sequence[Line],
    before: Path | None,
    report: Report,
    unusable: Callable[[Path], str | None],
    verify: Verify,
) -> Path | None:
    for path in reversed(_named(run)):
        if before is not None and (position_of(path) or ()) >= (position_of(before) or ()):
            continue
        by = committed_by(path)
        if by is not None and (later := given_up_by(lines, path, by)):
            report(f"{path} was committed by attempt {by} beside attempt {later}, which had started before it")
            continue
        try:
            verify(path)
        except CommitError as error:
            report(str(error))
            continue
        if (why := unusable(path)) is None:
            return path
        report(f"{path} does not fit: {why}")
    return None


def _end_quarantine(run: Run, started: int, fence: Fence, report: Report) -> None:
    """Give their names back to those that were put into quarantine since attempt `started`, the last one that trained."""
    for path in sorted(run.checkpoints.glob(".quarantined-*")):
        match = _ASIDE.fullmatch(path.name)
        if match and int(match[3]) > started and not path.with_name(match[2]).exists():
            fence()
            os.rename(path, path.with_name(match[2]))
            report(f"{path.name} is {match[2]} again: the attempts that loaded another one in its place failed too")


def set_aside_after(run: Run, attempt: int, start: Path | None, fence: Fence, report: Report) -> None:
    """Set aside the files that a start at `start` gave up: later checkpoints are renamed, half-written ones removed.

    What belongs to a newer attempt is left alone.
    """
    fence()
    first = (position_of(start) if start else None) or (0, 0)
    for path in [run.checkpoints / name for name in children(run.checkpoints)]:
        position, staged = position_of(path), _STAGED.fullmatch(path.name)
        if (
            path.name.startswith(".trash-")
            or (staged and int(staged[1]) <= attempt)
            or (position is not None and not is_committed(path))
        ):
            discard(path, fence)
        elif position is not None and position > first:
            aside = path.with_name(f".given-up-{path.name}.{attempt}")
            report(f"training starts again after {start.name if start else 'nothing'}: {path} becomes {aside.name}")
            os.rename(path, aside)


def retire(
    run: Run, retention: Retention, scores: Mapping[int, float], fence: Fence, evaluated: Collection[int] = ()
) -> None:
    """Delete the committed checkpoints that need not stay, and what was given up once two newer ones are there.

    Args:
        evaluated: as of `Retention.reasons`, read before the scores: an evaluation that ends in between has one then.
    """
    fault("commit.retire")
    line = line_of(run)
    kept = retention.reasons(line, scores, evaluated)
    for path in line:
        if path not in kept:
            discard(path, fence)
    for path in list(run.checkpoints.glob(".given-up-*")):
        match = _ASIDE.fullmatch(path.name)
        newer = sum((committed_by(other) or 0) >= int(match[3]) for other in line) if match else 0
        if newer >= NEVER_DELETED:
            discard(path, fence)


def prune(
    run: Run,
    attempt: int,
    retention: Retention,
    scores: Mapping[int, float],
    fence: Fence,
    evaluated: Collection[int] = (),
) -> None:
    """Make room before an attempt starts: delete what earlier ones left half-written, and the checkpoints that need not stay.

    No committed one goes unless two of those that stay have all their files.
    """
    for path in [run.checkpoints / name for name in children(run.checkpoints)]:
        staged = _STAGED.fullmatch(path.name)
        if path.name.startswith(".trash-") or (staged and int(staged[1]) < attempt):
            discard(path, fence)
    line = line_of(run)
    kept = retention.reasons(line, scores, evaluated)
    if len(kept) < len(line) and sum(map(_has_its_files, kept)) >= NEVER_DELETED:
        retire(run, retention, scores, fence, evaluated)


def _has_its_files(path: Path) -> bool:
    try:
        verify(path, checksums=False)
    except CommitError:
        return False
    return True


def size_of(manifest: dict[str, Any]) -> int:
    """Return the bytes of the files that a manifest lists."""
    return sum(entry["size"] for entry in manifest["files"].values())


FACTS = "batch.json"


def changed_since(settings: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a batch was begun with and that differ now; what only one version of hpcrl has is no difference."""
    return {name: settings[name] for name in sorted(settings.keys() & now.keys()) if settings[name] != now[name]}


def lost_with(run: Run, settings: Mapping[str, Any]) -> tuple[list[Path], dict[str, Any]]:
    """Return the newest checkpoints, newest first, from which training cannot go on with these `TrainerConfig.batch_settings`, and what those were begun with."""
    lost, changed = list[Path](), dict[str, Any]()
    for path in reversed(line_of(run)):
        remedy = f"delete the checkpoint: hpcrl checkpoint rm {run.name} {path.name} --force"
        facts = read_object(path / FACTS, remedy) if (position_of(path) or (0, 0))[1] else None
        if facts and not isinstance(facts.get("settings"), dict):
            raise damaged(path / FACTS, "it has no settings", remedy)
        differs = changed_since(facts["settings"], settings) if facts else {}
        if not differs:
            break
        lost.append(path)
        changed |= differs
    return lost, changed
