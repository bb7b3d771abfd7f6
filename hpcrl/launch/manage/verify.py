"""Verifies the files of a run against their checksums: every file that training depends on, or a person's conclusions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tomli

from hpcrl.config import Config
from hpcrl.data.batch_file import batch_steps, check_batches, read_batch
from hpcrl.data.cache_files import read_rows, read_turns, turn_files
from hpcrl.data.group_file import check_group, groups_of
from hpcrl.data.score_file import check_scores
from hpcrl.data.weight_files import check_export, check_weights
from hpcrl.errors import CommitError, ConfigError, DataError, RunError
from hpcrl.launch.inputs import changed_inputs
from hpcrl.rundir.checked_lines import damaged, read_lines
from hpcrl.rundir.checkpoints import noted_commit, require_checkpoints, samples_removed, verify_checkpoint
from hpcrl.rundir.checksums import changed_files
from hpcrl.rundir.commit import committed, is_committed, parse_json, verify
from hpcrl.rundir.layout import Run, position_of, step_of, version_of
from hpcrl.rundir.ledger import ended_attempts, outcome_of, parse_attempt
from hpcrl.rundir.other_roots import lost_folders
from hpcrl.rundir.records import whole_lines
from hpcrl.rundir.starts import parse_start, require_starts
from hpcrl.types import GroupMeta


@dataclass(frozen=True)
class VerifiedPart:
    """Files of one kind.

    Attributes:
        what: their name.
        damaged: yields a sentence for each that is not as it was written.
        remedy: what becomes of them, and what to do.
    """

    what: str
    damaged: Callable[[Run], Iterator[str]]
    remedy: str


def _configuration(run: Run) -> Iterator[str]:
    yield from changed_files(run)
    try:
        tomli.loads(run.config.read_text())
    except (OSError, ValueError) as error:
        yield f"{run.config}: {error}"


def _inputs(run: Run) -> Iterator[str]:
    changed = list[str]()
    with suppress(ConfigError):  # reported as damage of its own
        config = Config.from_toml([run.config])
        yield from _findings(lambda: changed.extend(changed_inputs(run, config, reread=True)))
    yield from changed


def _ledger(run: Run) -> Iterator[str]:
    yield from _json_lines(run.submission, whole=True)
    attempts, ended = list[int](), ended_attempts(run)
    damaged = [
        *_of_lines(run.attempts, lambda where, line: attempts.append(parse_attempt(where, line).number)),
        *_of_lines(run.starts, parse_start),
    ]
    for attempt in ended:
        damaged += _findings(lambda attempt=attempt: outcome_of(run, attempt))
    damaged += _findings(lambda: noted_commit(run))
    yield from damaged
    if damaged:  # what is missing then may be in what cannot be read
        return
    for attempt in sorted({*range(1, max([0, *attempts])), *ended} - {0}):
        if attempt not in attempts:
            yield f"{run.attempts} does not know attempt {attempt}"
        elif attempt not in ended:
            yield f"{run.outcome(attempt)} is missing"
    yield from _findings(lambda: require_starts(run))


def _of_lines(path: Path, parse: Callable[[str, bytes], object]) -> Iterator[str]:
    for where, line in whole_lines(path):
        yield from _findings(lambda where=where, line=line: parse(where, line))


def _metrics(run: Run) -> Iterator[str]:
    for path in sorted(run.metrics.glob("*.jsonl")):
        yield from _json_lines(path)


def _alerts(run: Run) -> Iterator[str]:
    if count := damaged(read_lines(run.alerts)):
        yield f"{run.alerts}: {count} of its lines"


def _json_lines(path: Path, whole: bool = False) -> Iterator[str]:
    """Yield the lines of a file that are no JSON objects. A line that a kill has cut off is no damage: readers skip it."""
    if not path.exists():
        return
    content = path.read_bytes()
    for number, line in enumerate([content] if whole else content.splitlines(), 1):
        try:
            if not isinstance(parse_json(line), dict):
                yield f"{path}{'' if whole else f', line {number}'}: it is no object"
        except ValueError as error:
            if whole:
                yield f"{path}: {error}"


def _samples(run: Run) -> Iterator[str]:
    seen, pruned = set[tuple[Path, int]](), _pruned(run)
    for step in batch_steps(run):
        try:
            file = read_batch(run.batch(step))
        except DataError:
            continue  # reported as damage of its own
        for group in file.batch.groups if file and step > pruned else ():
            path = run.path / group.path
            seen.add((path, group.offset))
            if path.exists() or step > (pruned := _pruned(run)):
                yield from _findings(lambda path=path, group=group: check_group(path, group))
                yield from _findings(lambda group=group: check_scores(run, group))
    for path in sorted(run.samples.glob("*/g*.safetensors")):
        groups = list[GroupMeta]()
        yield from _findings(lambda path=path, groups=groups: groups.extend(groups_of(path)), path)
        for group in (group for group in groups if (path, group.offset) not in seen):
            yield from _findings(lambda path=path, group=group: check_group(path, group), path)


def _pruned(run: Run) -> int:
    """Return the step up to which samples are not needed; where checkpoints or their record are damaged, that is not known of any."""
    try:
        return max(batch_steps(run), default=0) if list(_lost(run)) else samples_removed(run)
    except RunError:  # a part of the record
        return max(batch_steps(run), default=0)


def _datasets(run: Run) -> Iterator[str]:
    yield from _committed(run.datasets, lambda path: path.name)


def _turns(run: Run) -> Iterator[str]:
    for path in sorted(path for files in turn_files(run).values() for path in files):
        if damaged := read_turns(path).damaged:
            yield f"{path}: {damaged} of its lines"


def _rows(run: Run) -> Iterator[str]:
    for path in sorted(run.evals.glob("v*/*.rows")):
        _, damaged = read_rows(path)
        if damaged:
            yield f"{path}: {damaged} of its lines"


def _weights(run: Run) -> Iterator[str]:
    for version in committed(run.weights, version_of):
        path = run.weights_of(version)
        yield from _findings(lambda path=path: check_weights(path), path)


def _checkpoints(run: Run) -> Iterator[str]:
    yield from _committed(run.checkpoints, position_of, verify_checkpoint)


def _exports(run: Run) -> Iterator[str]:
    yield from _committed(run.exports, step_of, check_export)


def _lost(run: Run) -> Iterator[str]:
    try:
        require_checkpoints(run)
    except DataError as error:
        yield str(error)
    except RunError:  # a part of the record
        pass
    yield from (sentence for link, sentence in lost_folders(run).items() if link != run.checkpoints)


def _committed(
    folder: Path, number: Callable[[Path], object], verify: Callable[[Path], object] = verify
) -> Iterator[str]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if number(path) is not None and is_committed(path):
            yield from _findings(lambda path=path: verify(path), path)


def _findings(check: Callable[[], object], listed: Path | None = None) -> Iterator[str]:
    """Yield the findings of a check.

    Args:
        listed: what was there a moment ago; a run that goes on may have removed it since.
    """
    try:
        check()
    except (CommitError, DataError, RunError) as error:
        if listed is None or listed.exists():
            yield str(error)


PARTS = (
    VerifiedPart(
        "configuration and code", _configuration, "put them back, or `hpcrl resume` to go on with them as they are"
    ),
    VerifiedPart(
        "datasets, templates and models that it reads",
        _inputs,
        "put them back, or `hpcrl resume` to go on with them as they are",
    ),
    VerifiedPart("record of the run", _ledger, "put it back from a backup"),
    VerifiedPart(
        "batches",
        check_batches,
        "those after the newest checkpoint are composed again when the run is resumed; put an earlier one back from a backup, or start a "
        "new run from a checkpoint (trainer.resume_mode=from_path)",
    ),
    VerifiedPart("samples", _samples, "they are generated again when the run is resumed"),
    VerifiedPart("datasets", _datasets, "they are made again from their sources when the run is resumed"),
    VerifiedPart("turns of groups that are not finished", _turns, "they are generated again when the run is resumed"),
    VerifiedPart("rows of an evaluation that is not over", _rows, "they are generated again when the run is resumed"),
    VerifiedPart(
        "weights", _weights, "the newest version is published again when the run is resumed; no other is needed"
    ),
    VerifiedPart(
        "presence of checkpoints and of folders on other filesystems", _lost, "the run does not go on without them"
    ),
    VerifiedPart("checkpoints", _checkpoints, "the run is resumed from the newest one that is whole"),
    VerifiedPart("exports", _exports, "`hpcrl checkpoint export` makes one again, where its checkpoint is there"),
    VerifiedPart(
        "alerts", _alerts, "they are left out; the next attempt raises again what it finds after the last one"
    ),
    VerifiedPart("metrics", _metrics, "lines that cannot be read are left out of curves"),
)
